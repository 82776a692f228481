"""Where a site computes: its device, and memory that a GPU copies from and to."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from protofed.common.errors import ConfigError, UnavailableError


def page_locked(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Memory [*shape] of the host that a GPU copies from and to by itself; ordinary memory where there is no GPU.

    PyTorch keeps it for the next one, and gives it to nobody before a copy that is under way has ended.
    """
    return torch.empty(*shape, dtype=dtype, pin_memory=torch.cuda.is_available())


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
