"""One site in one round: all that a method's client half may touch.

With `plan.buffers = "local"` (METHODS §9.9) weights are shared and statistics of batch normalisation are not, as in
SiloBN (Andreux et al., DCL 2020). A site sends its statistics with the body all the same: their mean is the global
model's, which would predict nothing without. Whatever the method, it is handed what the server sent with this site's
own statistics in place, those that it sent last.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from protofed.client.data.site_data import SiteData
from protofed.client.models.split import SplitModel
from protofed.client.training.dp import DpContext
from protofed.common.config.recipe import Plan
from protofed.common.payload import Array, Part, Payload, SiteId, Tensors, Update, is_buffer
from protofed.common.protocol.scores import LOSS

OWN_BUFFERS = "buffers."  # of their names in the site's memory: `buffers.body.bn1.running_mean`
MODEL_PARTS = (Part.BODY, Part.HEAD)
STACKS = (Part.CLASS_MODELS, Part.SITE_MODELS)  # whose tensors are named by both
RECENT_STEPS = 64  # that `step_seconds` averages


@dataclass
class FitProgress:
    """How far the training of this round is; written by the training loop, read by the heartbeat's thread."""

    epoch: int = 0
    epochs: int = 0


class Throughput:
    """How much this daemon has trained, and how fast.

    Its counts stay on the site: steps and examples together give away the size of the data set.

    Attributes:
        examples: trained on since the daemon began, repetitions counted.
        steps: optimizer steps done.
        seconds: wall time of these steps, with data loading and checks in between.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._last_step = clock, 0.0
        self._durations: deque[float] = deque(maxlen=RECENT_STEPS)  # seconds
        self.examples = self.steps = 0
        self.seconds = 0.0

    def start(self) -> None:
        """Begin to measure: the time since the last fit belongs to no step."""
        self._last_step = self._clock()

    def step(self, examples: int) -> None:
        """Count a step. Only the training thread calls this, so it takes no lock."""
        now = self._clock()
        self._durations.append(now - self._last_step)
        self.seconds += now - self._last_step
        self._last_step = now
        self.steps += 1
        self.examples += examples

    def further(self, examples: int) -> None:
        """Count what a method trains once more within a step, as APFL its second model."""
        self.examples += examples

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of the last `RECENT_STEPS` steps; None before the first. Read from the heartbeat's thread."""
        durations = tuple(self._durations)  # a copy: the training thread appends meanwhile
        return sum(durations) / len(durations) if durations else None


class Checkpoints(Protocol):
    """Where one fit keeps the newest epoch of each call of `train`; calls are numbered from 1 in their order."""

    def read(self, call: int) -> Mapping[str, Tensor] | None:
        """The newest checkpoint of this call: tensors of any shapes by name; None if none is whole and undamaged."""

    def write(self, call: int, tensors: Mapping[str, Tensor]) -> None:
        """Replace this call's checkpoint by these tensors of any shapes. A full disk stops no training."""


class NoCheckpoints:
    """Keeps nothing: an interrupted fit starts again."""

    def read(self, call: int) -> None:
        """Always None."""

    def write(self, call: int, tensors: Mapping[str, Tensor]) -> None:
        """Discard them."""


class Ranks(Protocol):
    """The processes that train for this site as one: each runs all of `train` on its share of every batch."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate this process's share of the gradients of a whole batch's mean loss []."""

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Sum the gradients of these parameters, of any shapes, over all processes in place.

        Raises:
            OutOfMemoryError: another process ran out of memory in this step.
        """

    def ran_out_of_memory(self, error: torch.OutOfMemoryError) -> None:
        """Agree that this step ran out of memory, here or on another process; all of them repeat it."""

    def seed(self, seed: int, call: int, epoch: int) -> None:
        """Seed the default generators of layers such as dropout, before an epoch of a call of `train`."""


class SingleProcess:
    """The `Ranks` of a site that trains in one process."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate all gradients of a batch's mean loss []."""
        loss.backward()  # type: ignore[no-untyped-call]

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Nothing to add: one process has them whole."""

    def ran_out_of_memory(self, error: torch.OutOfMemoryError) -> None:
        """Nothing to do: no other process repeats the step."""

    def seed(self, seed: int, call: int, epoch: int) -> None:
        """Nothing to align: `seeded` has seeded the only process."""


@dataclass(frozen=True)
class FitStart:
    """What a fit began with, where that is not the model that was received.

    Attributes:
        model: BODY and HEAD that its first step computed with; what few images teach is found by its units.
        sent: the tensors that the update has, as they were then and as the server knows them: what may not leave leaves
            like this; None: as in `model`.
    """

    model: Payload
    sent: Payload | None = None


@dataclass
class FitContext:
    """Everything that a method's client half may touch in one round.

    Attributes:
        rounds: of the whole run; learning rate schedules and FedProc's loss need it.
        model: made by `load_global` from what was received; after `fit` it is the personal model
            of a method whose `personal` is "trained".
        data: a fit may take a part of it instead, which it trains on.
        classes: C, of the run.
        rng: a CPU generator made by `seeded`; all randomness of a fit comes from it.
        client_state: tensors of any shapes that the site keeps from round to round of this run, stored with the
            update, so an update that never counted leaves the memory of the round before.
        fit_progress: progress, written by the training loop for the heartbeat.
        throughput: that of the daemon, over all its fits.
        check: called between batches; raises TaskAbortedError when the server no longer waits for the task.
        checkpoints: used by the training loop, if the plan asks for it.
        train_calls: calls of `train` so far.
        ranks: the processes that train together.
        participation: the recipe's: of the enrolled trainers, the share that a round needs, and so of the rounds the
            share that a site may expect to train in.
        start: set by a fit that begins with another model than the one received.
        sent_model: the model that the fit trained and sends, if it leaves another model in `model`.
        to_its_end: whether a fit that diverges trains on: under secure aggregation stopping would tell of images.
        dp: what noise is drawn from, where the plan asks for it; None: it does not, or this is no trainer's fit.
    """

    site: SiteId
    round: int
    rounds: int
    model: SplitModel
    data: SiteData
    classes: int
    plan: Plan
    rng: torch.Generator
    client_state: dict[Part, Tensors]
    fit_progress: FitProgress = field(default_factory=FitProgress)
    throughput: Throughput = field(default_factory=Throughput)
    check: Callable[[], None] = lambda: None
    checkpoints: Checkpoints = field(default_factory=NoCheckpoints)
    train_calls: int = 0
    ranks: Ranks = field(default_factory=SingleProcess)
    participation: float = 1.0
    start: FitStart | None = None
    sent_model: Payload | None = None
    to_its_end: bool = False
    dp: DpContext | None = None

    @property
    def lr(self) -> float:
        """The learning rate of this round."""
        return self.plan.learning_rate(self.round, self.rounds)

    def update(self, payload: Payload, **metrics: float) -> Update:
        """The update that this site offers; the policy decides what of it leaves.

        Args:
            metrics: `loss`, and up to 16 numbers of the method's own, which become `train.<name>`.
        """
        scores = {name if name == LOSS else f"train.{name}": value for name, value in metrics.items()}
        # A count is no noisy sum; whatever the policy says, it does not leave beside noise that hides it.
        weight = None if self.plan.dp is not None else float(len(self.data.train))
        return Update(self.site, payload, scores, weight)


def seeded(seed: int, round: int, site: SiteId, device: torch.device) -> torch.Generator:
    """The CPU generator of one fit: of batches, augmentation and dropout.

    Args:
        seed: the run's, or by the policy (`batch_order`) one that only the site can make.
    """
    digest = hashlib.blake2b(f"{seed}/{round}/{site}".encode(), digest_size=7).digest()
    return generator(int.from_bytes(digest, "big"), device)


def generator(number: int, device: torch.device) -> torch.Generator:
    """A CPU generator with this seed.

    PyTorch's default generators are seeded, too, for layers that draw by themselves, such as dropout. The device's
    generator is seeded only where it is used, because `torch.manual_seed` visits every device each time.
    """
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
    return torch.Generator().manual_seed(number)


def with_own_buffers(received: Payload, local: FitContext) -> Payload:
    """What the method installs and trains from; what was received, before this site has sent any.

    Class models, which a site mixes, and models of other sites have them in each row [R, ...].
    """
    own = _remembered(local.client_state)
    return _WithOwn(received, own) if local.plan.buffers == "local" and own else received


def client_state_with_buffers(local: FitContext, update: Payload, before: Payload) -> Payload:
    """The memory to keep after a fit: the method's, and the statistics of its update.

    Args:
        before: the memory before the fit, whose statistics stay where the update has none.
    """
    if local.plan.buffers != "local":
        return local.client_state
    sent = {
        f"{OWN_BUFFERS}{part}.{name}": array
        for part in MODEL_PARTS
        for name, array in update.get(part, {}).items()
        if is_buffer(name)
    }
    own = {OWN_BUFFERS + path: array for path, array in _remembered(before).items()} | sent
    return (
        {**local.client_state, Part.PRIVATE: {**local.client_state.get(Part.PRIVATE, {}), **own}}
        if own
        else local.client_state
    )


class _WithOwn(Mapping[Part, Tensors]):
    """What was received, with own statistics in place as a part is looked at: an export reads no more than it needs."""

    def __init__(self, received: Payload, own: Mapping[str, Array]) -> None:
        self._received, self._own = received, own

    def __getitem__(self, part: Part) -> Tensors:
        tensors = self._received[part]
        if part in MODEL_PARTS:
            return _replaced(tensors, self._own, f"{part}.")
        return _replaced(tensors, self._own) if part in STACKS else tensors

    def __iter__(self) -> Iterator[Part]:
        return iter(self._received)

    def __len__(self) -> int:
        return len(self._received)


def _remembered(client_state: Payload) -> dict[str, Array]:
    """By part and name, as `body.bn1.running_mean`."""
    private = client_state.get(Part.PRIVATE, {})
    return {name.removeprefix(OWN_BUFFERS): array for name, array in private.items() if name.startswith(OWN_BUFFERS)}


def _replaced(tensors: Tensors, own: Mapping[str, Array], prefix: str = "") -> Tensors:
    """The tensors [...] with own ones in place of those that end in their shape."""

    def chosen(name: str, array: Array) -> Array:
        mine = own.get(prefix + name)
        if mine is None or array.shape[array.ndim - mine.ndim :] != mine.shape:
            return array
        return np.array(np.broadcast_to(mine, array.shape))

    return {name: chosen(name, array) for name, array in tensors.items()}
