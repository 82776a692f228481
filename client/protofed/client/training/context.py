"""One site in one round: all that a method's client half may touch."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from protofed.client.data.site_data import SiteData
from protofed.client.models.split import SplitModel
from protofed.common.config.recipe import Plan
from protofed.common.payload import Part, Payload, SiteId, Tensors, Update

RECENT_STEPS = 64


@dataclass
class FitProgress:
    """How far the training of this round is; read by the heartbeat while training goes on."""

    epoch: int = 0
    epochs: int = 0


class Throughput:
    """How much this daemon has trained, and how fast. It stays on the site: steps and examples would tell of its data.

    Attributes:
        examples: that were trained on, each as often as it was.
        steps: that were done.
        seconds: that these took, with what came between them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._at = clock, 0.0
        self._gaps: deque[float] = deque(maxlen=RECENT_STEPS)  # seconds
        self.examples = self.steps = 0
        self.seconds = 0.0

    def start(self) -> None:
        """Training begins."""
        self._at = self._clock()

    def step(self, examples: int) -> None:
        """A step was done; called by one thread alone, without a lock."""
        now = self._clock()
        self._gaps.append(now - self._at)
        self.seconds += now - self._at
        self._at = now
        self.steps += 1
        self.examples += examples

    @property
    def step_seconds(self) -> float | None:
        """The mean of recent steps, with what came between them; None before the first."""
        gaps = tuple(self._gaps)
        return sum(gaps) / len(gaps) if gaps else None


class Checkpoints(Protocol):
    """Where one fit keeps its training's newest epochs; calls of `train` are numbered from 1 in their order."""

    def read(self, call: int) -> Mapping[str, Tensor] | None:
        """What was kept last of this call, whole and undamaged; else None."""

    def keep(self, call: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep these in place of what was kept of this call before. A disk that is full stops no training."""


class NoCheckpoints:
    """A fit that begins anew when it was interrupted."""

    def read(self, call: int) -> None:
        """Nothing was kept."""

    def keep(self, call: int, tensors: Mapping[str, Tensor]) -> None:
        """Nothing is."""


class Ranks(Protocol):
    """The processes that train for this site as one; each does all that `train` does, and takes its part of it."""

    def backward(self, loss: Tensor) -> None:
        """The gradients of this process's part of a batch's mean loss, added to those of its parameters."""

    def add_up(self, gradients: Sequence[Tensor]) -> None:
        """All parts together, in place; OutOfMemoryError if memory did not suffice for another one."""

    def short_of_memory(self, error: torch.OutOfMemoryError) -> None:
        """Here or elsewhere: nobody goes on with this step, and all will try it again."""

    def seed(self, seed: int, call: int, epoch: int) -> None:
        """Seed what layers draw from by themselves, before an epoch of a call of `train`."""


class SingleProcess:
    """One process, as almost everywhere."""

    def backward(self, loss: Tensor) -> None:
        """All gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def add_up(self, gradients: Sequence[Tensor]) -> None:
        """They are whole."""

    def short_of_memory(self, error: torch.OutOfMemoryError) -> None:
        """Nobody else is to be told."""

    def seed(self, seed: int, call: int, epoch: int) -> None:
        """They draw on."""


@dataclass
class FitContext:
    """What a fit works on.

    Attributes:
        rounds: of the whole run; schedules need it.
        model: made by `install` from what was received; after `fit` it is the personal model
            of a method whose `personal` is "trained".
        classes: C, of the run.
        rng: of the CPU, seeded by (run, round, site); all randomness of a fit comes from it.
        memory: what the site keeps from round to round for this run; counts only if the update does.
        steps: progress, written by the training loop.
        pace: likewise; of the daemon, not only of this round.
        check: called between batches; raises when the task was called off.
        checkpoints: used by the training loop, if the plan asks for it.
        trainings: calls of `train` so far.
        ranks: the processes that do it together.
    """

    site: SiteId
    round: int
    rounds: int
    model: SplitModel
    data: SiteData
    classes: int
    plan: Plan
    rng: torch.Generator
    memory: dict[Part, Tensors]
    steps: FitProgress = field(default_factory=FitProgress)
    pace: Throughput = field(default_factory=Throughput)
    check: Callable[[], None] = lambda: None
    checkpoints: Checkpoints = field(default_factory=NoCheckpoints)
    trainings: int = 0
    ranks: Ranks = field(default_factory=SingleProcess)

    def update(self, payload: Payload, **metrics: float) -> Update:
        """What this site offers; the policy decides what of it leaves."""
        return Update(self.site, payload, metrics, weight=float(len(self.data.train)))


def seeded(seed: int, round: int, site: SiteId, device: torch.device) -> torch.Generator:
    """The generator of one fit, of the CPU: equal in a simulation and on a site.

    PyTorch's own ones are seeded, too, for layers that draw by themselves, such as dropout; the device's only where it
    is used, because `torch.manual_seed` would look for all of them each time.
    """
    digest = hashlib.blake2b(f"{seed}/{round}/{site}".encode(), digest_size=7).digest()
    number = int.from_bytes(digest, "big")
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
    return torch.Generator().manual_seed(number)
