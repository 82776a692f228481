"""What one call of `train` changes: the optimizers' state, and the checkpoints of it all on the site's disk.

The plan's optimizers are PyTorch's functional API, which does the arithmetic of `torch.optim`'s classes. The first
instance of such a class imports PyTorch's compiler: a second of processor in every process that trains, and nothing of
it is used.

An interrupted fit goes on after its newest epoch. One that starts again instead, for want of an undamaged checkpoint,
ends with the same bytes. Only one fit's are kept at a time.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from blake3 import blake3
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from protofed.client.training.context import Checkpoints, FitContext
from protofed.common.config.recipe import OptimizerName, Plan
from protofed.common.errors import StateError
from protofed.common.protocol.messages import Task
from protofed.common.storage import files
from protofed.common.version import VERSION

log = structlog.get_logger()
FOLDER = ".fit"  # of the site's state folder, among those of its runs: no run can have this name
_MAC_BYTES = 32
_NAME = re.compile(r"[0-9a-f]{16}-\d{3}\.safetensors")  # only files of such a name are ever removed
_MOMENTS = "optimizer."
Moments = dict[str, Tensor]  # of one parameter, by the names in `torch.optim`: averages of its shape, and `step` []


@dataclass(frozen=True, eq=False)
class ParameterGroup:
    """Tensors that `train` moves by settings of their own, apart from all others; None: as the plan has it.

    The norm of a group's gradients is clipped by itself, so what is trained beside a model does not change its steps.

    Attributes:
        parameters: of any shapes. What needs no gradient is not moved, but checkpoints cover it.
        lr: of this call of `train`; None: `FitContext.lr`.
        max_grad_norm: infinite: gradients are not clipped.
    """

    parameters: Iterable[Tensor]
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None
    optimizer: OptimizerName | None = None


def sgd_length(steps: int, momentum: float, pull: float = 0.0) -> float:
    """How far so many steps of SGD lead by gradients of 1, in learning rates: without momentum and pull, `steps`.

    Of gradients g it is what their weights in the sum of all steps add up to: FedNova's ||a||_1 (METHODS §5.23).

    Args:
        pull: eta mu, the share of the way back that a proximal term takes off in a step.
    """
    velocity = length = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1 - pull * length
        length += velocity
    return length


class Optimizer:
    """The optimizer of one group in one call of `train`, with `torch.optim`'s defaults where the plan says nothing.

    Attributes:
        trained: what it moves, tensors of any shapes.
        moments: by the parameter's number; of those that have had a gradient.
    """

    def __init__(self, plan: Plan, trained: Sequence[Tensor], lr: float) -> None:
        self._plan, self.trained, self._lr = plan, trained, lr
        self.moments: dict[int, Moments] = {}

    @classmethod
    def of(cls, group: ParameterGroup, plan: Plan, lr: float) -> Optimizer:
        """The group's, by the plan where the group says nothing.

        Args:
            lr: of the round.
        """
        names = ("momentum", "weight_decay", "max_grad_norm", "optimizer")
        own = {name: value for name in names if (value := getattr(group, name)) is not None}
        trained = [tensor for tensor in group.parameters if tensor.requires_grad]
        return cls(plan.model_copy(update=own), trained, lr if group.lr is None else group.lr)

    @torch.no_grad()
    def step(self) -> None:
        """Clip the gradients, then move the parameters in place; those without a gradient stay, with their moments."""
        if (most := self._plan.max_grad_norm) is not None and most < math.inf:
            nn.utils.clip_grad_norm_(self.trained, most)
        numbers, tensors, gradients = [], [], []
        for number, tensor in enumerate(self.trained):
            if (gradient := tensor.grad) is not None:
                numbers.append(number)
                tensors.append(tensor)
                gradients.append(gradient)
        if not tensors:
            return
        if self._plan.optimizer == "sgd":
            self._step_sgd(numbers, tensors, gradients)
        else:
            self._step_adam(numbers, tensors, gradients)

    def _step_sgd(self, numbers: list[int], tensors: list[Tensor], gradients: list[Tensor]) -> None:
        buffers = [self.moments.get(number, {}).get("momentum_buffer") for number in numbers]
        sgd(
            tensors,
            gradients,
            buffers,
            lr=self._lr,
            momentum=self._plan.momentum,
            weight_decay=self._plan.weight_decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for number, buffer in zip(numbers, buffers, strict=True):
            if buffer is not None:  # `sgd` makes them in the first step, if there is momentum
                self.moments[number] = {"momentum_buffer": buffer}

    def _step_adam(self, numbers: list[int], tensors: list[Tensor], gradients: list[Tensor]) -> None:
        for number, tensor in zip(numbers, tensors, strict=True):
            if number not in self.moments:
                averages = {name: torch.zeros_like(tensor) for name in ("exp_avg", "exp_avg_sq")}
                self.moments[number] = {"step": torch.tensor(0.0), **averages}  # on the CPU: no step waits for a GPU
        moments = [self.moments[number] for number in numbers]
        rule = adam if self._plan.optimizer == "adam" else adamw
        rule(
            tensors,
            gradients,
            exp_avgs=[moment["exp_avg"] for moment in moments],
            exp_avg_sqs=[moment["exp_avg_sq"] for moment in moments],
            max_exp_avg_sqs=[],
            state_steps=[moment["step"] for moment in moments],
            lr=self._lr,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=self._plan.weight_decay,
            amsgrad=False,
            maximize=False,
        )


@dataclass
class TrainingState:
    """What one call of `train` changes, besides the model.

    Attributes:
        covered: tensors of any shapes that the call names, of the model or of the method alone, trained or not.
        optimizers: one a group.
        total: [], sum of the losses of `examples` examples, on the device.
        examples: trained on so far, repetitions counted.
        steps: on these examples.
        micro_batch: examples in a micro-batch; 0: whole batches fit into memory.
    """

    covered: list[Tensor]
    optimizers: list[Optimizer]
    total: Tensor
    examples: int = 0
    steps: int = 0
    micro_batch: int = 0


def save_epoch(local: FitContext, state: TrainingState, epoch: int) -> None:
    """Write a checkpoint after an epoch, if the plan asks for them."""
    if not local.plan.checkpoint:
        return
    progress = torch.tensor([epoch, state.examples, state.steps, state.micro_batch])
    generators = {name: generator.get_state() for name, generator in _generators(local).items()}
    tensors = _tensors(local, state) | generators | _moments(state.optimizers) | {"progress": progress}
    local.checkpoints.write(local.train_calls, tensors)


def restore_epoch(local: FitContext, state: TrainingState) -> int:
    """Load this call's checkpoint into the model and `state`; the last epoch done, 0 if no checkpoint fits."""
    checkpoint = local.checkpoints.read(local.train_calls) if local.plan.checkpoint else None
    if checkpoint is None:
        return 0
    tensors, generators = _tensors(local, state), _generators(local)
    if not _fits(checkpoint, tensors, generators.keys() | {"progress"}):
        log.warning("a checkpoint is of another model; training starts over", round=local.round)
        return 0
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(checkpoint[name])  # in place: the optimizer and the method's closures hold these very tensors
    for name, generator in generators.items():
        generator.set_state(checkpoint[name])
    _load_moments(state.optimizers, checkpoint)
    epoch, state.examples, state.steps, state.micro_batch = checkpoint["progress"].tolist()
    log.info("training continues from a checkpoint", round=local.round, training=local.train_calls, after_epoch=epoch)
    return int(epoch)


def _tensors(local: FitContext, state: TrainingState) -> dict[str, Tensor]:
    """The live tensors that training changes: the model's, with all its buffers, and those that are named beside it.

    Parameters of the model may be named, too: by identity, so that each is written once.
    """
    tensors = (*local.model.named_parameters(), *local.model.named_buffers())
    model: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in tensors}
    in_model = {id(tensor) for tensor in model.values()}
    beside = {f"beside.{n}": tensor for n, tensor in enumerate(state.covered) if id(tensor) not in in_model}
    return model | beside | {"total": state.total}


def _generators(local: FitContext) -> dict[str, torch.Generator]:
    # The default ones, too: layers such as dropout draw from them.
    generators = {"rng.site": local.rng, "rng.cpu": torch.default_generator}
    if (device := local.data.device).type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators["rng.cuda"] = torch.cuda.default_generators[index]
    return generators


def _fits(checkpoint: Mapping[str, Tensor], tensors: Mapping[str, Tensor], other_names: set[str]) -> bool:
    # Moments aside: an optimizer makes them in its first step, so there are none yet to compare with.
    names = {name for name in checkpoint if not name.startswith(_MOMENTS)}
    return names == tensors.keys() | other_names and all(
        (checkpoint[name].shape, checkpoint[name].dtype) == (tensor.shape, tensor.dtype)
        for name, tensor in tensors.items()
    )


def _moments(optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Momentum, or Adam's averages, as `optimizer.<number of the group>.<number of the parameter>.<name>`."""
    return {
        f"{_MOMENTS}{group}.{number}.{name}": value
        for group, optimizer in enumerate(optimizers)
        for number, moments in optimizer.moments.items()
        for name, value in moments.items()
    }


def _load_moments(optimizers: Sequence[Optimizer], checkpoint: Mapping[str, Tensor]) -> None:
    for path, tensor in checkpoint.items():
        if path.startswith(_MOMENTS):
            group, number, name = path.removeprefix(_MOMENTS).split(".", 2)
            optimizer = optimizers[int(group)]
            device = "cpu" if name == "step" else optimizer.trained[int(number)].device
            optimizer.moments.setdefault(int(number), {})[name] = tensor.to(device)


@contextmanager
def on_disk(state: Path, task: Task) -> Iterator[Checkpoints]:
    """One task's checkpoints in a site's state folder; those of other tasks are removed.

    They are removed when the task is done, fails or is aborted; a process that is killed leaves them for the next.
    """
    checkpoints = DiskCheckpoints(state / FOLDER, task)
    checkpoints.clear(other_tasks=True)  # left by a daemon that died; their task may be over
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
            log.warning("a checkpoint cannot be read; training starts over", reason=str(error.strerror))
            return None
        content, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        if mac != self._mac(call, content):
            log.warning("a checkpoint is damaged; training starts over", path=str(self._path(call)))
            return None
        return load(content)

    def write(self, call: int, tensors: Mapping[str, Tensor]) -> None:
        """Write this call's tensors, of any shapes [...] and on any device, durably."""
        # Cloned: safetensors refuses tensors that share memory, such as tied weights.
        content = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
        try:
            files.write(self._path(call), content + self._mac(call, content))
        except StateError as error:
            log.warning("cannot write an epoch's checkpoint; training continues", reason=str(error))

    def clear(self, *, other_tasks: bool = False) -> None:
        """Remove this task's checkpoints, or with `other_tasks` those of all other tasks."""
        if other_tasks:
            files.sweep([self._folder])
        for path in self._folder.glob("*.safetensors"):
            if _NAME.fullmatch(path.name) and path.name.startswith(self._name) is not other_tasks:
                with contextlib.suppress(OSError):
                    path.unlink()

    @property
    def _name(self) -> str:
        return self._key.hexdigest()[:16]

    def _path(self, call: int) -> Path:
        return self._folder / f"{self._name}-{call:03d}.safetensors"

    def _mac(self, call: int, content: bytes) -> bytes:
        return blake3(content, key=self._key.digest()).update(str(call).encode()).digest()
