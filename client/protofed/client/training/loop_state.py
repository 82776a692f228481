"""What one call of `train` changes, to and from a checkpoint: weights, optimizer, generators, sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from protofed.client.training.context import FitContext

log = structlog.get_logger()
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
