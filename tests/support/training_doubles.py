"""What training meets in tests: a memory that is short, and an end like a process's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from protofed.client.training.context import FitContext
from protofed.client.training.loop import Loss

LocalOf = Callable[..., FitContext]


class Short:
    """A loss with memory for `room` examples at a time."""

    def __init__(self, loss: Loss, room: int) -> None:
        self.loss, self.room, self.sizes = loss, room, list[int]()

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.sizes.append(len(x))
        if len(x) > self.room:
            raise torch.OutOfMemoryError("simulated")
        return self.loss(x, y)


class KilledError(BaseException):
    """Like a process's end: nothing of the client handles it."""


@dataclass
class Deadly:
    """Checks of the training loop, of which the one of this number, counted from 0, kills."""

    at: int | None = None
    error: BaseException = field(default_factory=KilledError)
    made: int = 0

    def __call__(self) -> None:
        if self.made == self.at:
            raise self.error
        self.made += 1
