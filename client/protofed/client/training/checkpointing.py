"""Checkpoints of an interrupted fit: what one call of `train` changes, and the site's disk that it is kept on.

A fit goes on after its newest epoch. One that starts again instead, for want of an undamaged checkpoint, ends with the
same bytes. One fit's checkpoints are kept at a time.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from blake3 import blake3
from safetensors.torch import load, save
from torch import Tensor

from protofed.client.training.context import Checkpoints, FitContext
from protofed.common.errors import StateError
from protofed.common.protocol.messages import Task
from protofed.common.storage import files
from protofed.common.version import VERSION

log = structlog.get_logger()
FOLDER = ".fit"  # of the site's state folder, among those of its runs: no run can have this name
_SEAL_BYTES = 32
_NAME = re.compile(r"[0-9a-f]{16}-\d{3}\.safetensors")  # only files of such a name are ever removed
_MOMENTS = "optimizer."


@dataclass
class Training:
    """What one call of `train` changes, the model aside.

    Attributes:
        trained: parameters, of the model or not.
        total: [], sum of the losses of all examples seen, on the device.
        seen: examples in that sum.
        size: examples in a micro-batch; 0: whole batches fit into memory.
    """

    trained: list[Tensor]
    optimizer: torch.optim.Optimizer
    total: Tensor
    seen: int = 0
    size: int = 0


def keep(local: FitContext, training: Training, epoch: int) -> None:
    """Write a checkpoint after an epoch, if the plan asks for them."""
    if not local.plan.checkpoint:
        return
    counts = torch.tensor([epoch, training.seen, training.size])
    states = {name: generator.get_state() for name, generator in _generators(local).items()}
    tensors = _tensors(local, training) | states | _moments(training.optimizer) | {"counts": counts}
    local.checkpoints.keep(local.trainings, tensors)


def restore(local: FitContext, training: Training) -> int:
    """Take up this call's checkpoint; the last epoch that it has done, 0 if there is none that fits."""
    kept = local.checkpoints.read(local.trainings) if local.plan.checkpoint else None
    if kept is None:
        return 0
    tensors, generators = _tensors(local, training), _generators(local)
    if not _fit_to(kept, tensors, generators.keys() | {"counts"}):
        log.warning("a checkpoint is of another model; training begins anew", round=local.round)
        return 0
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(kept[name])  # in place: the optimizer and the method's closures hold these very tensors
    for name, generator in generators.items():
        generator.set_state(kept[name])
    _give_moments(training.optimizer, kept)
    epoch, training.seen, training.size = kept["counts"].tolist()
    log.info("training goes on", round=local.round, training=local.trainings, after_epoch=epoch)
    return int(epoch)


def _tensors(local: FitContext, training: Training) -> dict[str, Tensor]:
    """The live tensors that training changes: the model's, with all its buffers, and those trained outside of it."""
    named = (*local.model.named_parameters(), *local.model.named_buffers())
    model: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in named}
    own = {id(tensor) for tensor in model.values()}
    beside = {f"trained.{n}": tensor for n, tensor in enumerate(training.trained) if id(tensor) not in own}
    return model | beside | {"total": training.total}


def _generators(local: FitContext) -> dict[str, torch.Generator]:
    generators = {"rng.site": local.rng, "rng.cpu": torch.default_generator}
    if (device := local.data.device).type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators["rng.cuda"] = torch.cuda.default_generators[index]
    return generators


def _fit_to(kept: Mapping[str, Tensor], tensors: Mapping[str, Tensor], others: set[str]) -> bool:
    names = {name for name in kept if not name.startswith(_MOMENTS)}
    return names == tensors.keys() | others and all(
        (kept[name].shape, kept[name].dtype) == (tensor.shape, tensor.dtype) for name, tensor in tensors.items()
    )


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Momentum, or Adam's averages, as `optimizer.<number of the parameter>.<name>`."""
    by_parameter = optimizer.state_dict()["state"].items()
    return {
        f"{_MOMENTS}{number}.{name}": value
        for number, values in by_parameter
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def _give_moments(optimizer: torch.optim.Optimizer, kept: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for path, tensor in kept.items():
        if path.startswith(_MOMENTS):
            number, name = path.removeprefix(_MOMENTS).split(".", 1)
            state.setdefault(int(number), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


@contextmanager
def on_disk(state: Path, task: Task) -> Iterator[Checkpoints]:
    """One task's checkpoints in a site's state folder; those of other tasks are removed.

    These are removed when the task is done, fails or is called off; a process that is killed leaves them for the next.
    """
    checkpoints = DiskCheckpoints(state / FOLDER, task)
    checkpoints.clear(others=True)
    try:
        yield checkpoints
    except Exception:  # not BaseException: what ends the process must leave them for the next one
        checkpoints.clear()
        raise
    checkpoints.clear()


class DiskCheckpoints:
    """A file for each call of `train`, with a MAC under a key of this task and software.

    A file of another task, another version or a damaged disk fails the MAC, and is not read.
    """

    def __init__(self, folder: Path, task: Task) -> None:
        # The versions belong to the key: another PyTorch may compute other bytes from the same checkpoint.
        identity = (VERSION, torch.__version__, task.run, task.round, task.task_id, task.base_digest)
        self._folder, self._key = folder, blake3("/".join(map(str, identity)).encode())

    def read(self, call: int) -> Mapping[str, Tensor] | None:
        """This call's checkpoint: tensors of any shapes [...] by name, on the CPU."""
        try:
            data = self._path(call).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("a checkpoint cannot be read; training begins anew", why=str(error.strerror))
            return None
        content, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
        if seal != self._seal(call, content):
            log.warning("a checkpoint is damaged; training begins anew", path=str(self._path(call)))
            return None
        return load(content)

    def keep(self, call: int, tensors: Mapping[str, Tensor]) -> None:
        """Write this call's tensors, of any shapes [...] and on any device, durably."""
        content = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
        try:
            files.write(self._path(call), content + self._seal(call, content))
        except StateError as error:
            log.warning("an epoch cannot be kept; training goes on", why=str(error))

    def clear(self, *, others: bool = False) -> None:
        """Remove this task's checkpoints, or with `others` those of all other tasks."""
        if others:
            files.sweep([self._folder])
        for path in self._folder.glob("*.safetensors"):
            if _NAME.fullmatch(path.name) and path.name.startswith(self._name) is not others:
                with contextlib.suppress(OSError):
                    path.unlink()

    @property
    def _name(self) -> str:
        return self._key.hexdigest()[:16]

    def _path(self, call: int) -> Path:
        return self._folder / f"{self._name}-{call:03d}.safetensors"

    def _seal(self, call: int, content: bytes) -> bytes:
        return blake3(content, key=self._key.digest()).update(str(call).encode()).digest()
