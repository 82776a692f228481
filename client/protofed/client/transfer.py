"""Where a site computes, and how tensors get to arrays and back: one copy a dtype, through page-locked memory.

A copy from a GPU waits for all the work that is queued there, and so does one from memory that is not page-locked. A
payload has some tensors for each layer, so they go together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from protofed.common.errors import ConfigError, UnavailableError
from protofed.common.payload import Array, Tensors


def to_arrays(tensors: Mapping[str, Tensor]) -> Tensors:
    """Contiguous NumPy copies of tensors of any shapes, dtypes and layouts, by name and in their order."""
    arrays: dict[str, Array] = {}
    for names in _alike(tensors, lambda name: (tensors[name].device, tensors[name].dtype)):
        flat = torch.cat([tensors[name].detach().reshape(-1) for name in names])
        staged = page_locked(flat.shape, flat.dtype)
        staged.copy_(flat)  # waits for the device, once
        for name, piece in zip(names, torch.split(staged, [tensors[name].numel() for name in names]), strict=True):
            arrays[name] = np.array(piece.view(tensors[name].shape).numpy())  # a copy: page-locked memory is scarce
    return {name: arrays[name] for name in tensors}


def to_tensors(arrays: Tensors, targets: Mapping[str, Tensor]) -> None:
    """Copy the arrays of these tensors' names, of the same shapes and any dtypes, into the tensors, in place."""
    for names in _alike(targets, lambda name: (targets[name].device, arrays[name].dtype)):
        flat = np.concatenate([arrays[name].reshape(-1) for name in names])
        staged = page_locked(flat.shape, torch.from_numpy(flat).dtype)
        staged.numpy()[:] = flat
        moved = staged.to(targets[names[0]].device, non_blocking=True)
        for name, piece in zip(names, torch.split(moved, [arrays[name].size for name in names]), strict=True):
            targets[name].copy_(piece.view(targets[name].shape))


def page_locked(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Memory [*shape] of the host that a GPU copies from and to by itself; ordinary memory where there is no GPU.

    PyTorch keeps it for the next one, and gives it to nobody before a copy that is under way has ended.
    """
    return torch.empty(*shape, dtype=dtype, pin_memory=torch.cuda.is_available())


def _alike(names: Iterable[str], key: Callable[[str], Hashable]) -> list[list[str]]:
    """The names whose keys are equal, together and in their order."""
    groups: dict[Hashable, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return list(groups.values())


def pick_device(name: str) -> torch.device:
    """The device of the name `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`.

    Raises:
        ConfigError: another name.
        UnavailableError: a GPU that is not there, as while its driver loads.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise ConfigError(f"device '{name}': expected auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if int(match[1] or 0) >= count:
        raise UnavailableError(f"device '{name}': this machine offers {count} GPUs to PyTorch; take another or 'cpu'")
    return torch.device(name)
