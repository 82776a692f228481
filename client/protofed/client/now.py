"""What a daemon is doing at this moment: written by its agent, read by its heartbeat."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from protofed.client.local import Steps
from protofed.common.task import Activity, Progress

# The site's own, and long: a server that chose it could tell one batch from the next, and count them.
MOVING_S = 60.0


class CalledOffError(Exception):
    """Nobody waits for the task any more."""


@dataclass
class Now:
    """What the daemon is doing; the heartbeat reads it.

    Attributes:
        clock: monotonic seconds.
        moved_at: when training last got on, by that clock.
    """

    run: str = ""
    nonce: str = ""
    activity: Activity = Activity.IDLE
    steps: Steps = field(default_factory=Steps)
    called_off: str = ""  # the nonce that the server no longer waits for
    heartbeat_s: float = 1.0  # the run's own, once there is a run
    clock: Callable[[], float] = time.monotonic
    moved_at: float = -math.inf

    def progress(self, bytes_moved: int) -> Progress:
        """For a heartbeat: of training, the epoch, and whether it moved within `MOVING_S`."""
        moving = self.activity is Activity.TRAINING and self.clock() - self.moved_at < MOVING_S
        return Progress(self.nonce, self.activity, self.steps.epoch, self.steps.epochs, moving, bytes_moved)

    def check(self) -> None:
        """Between batches: notes that training moves. Raises CalledOffError if the server called this task off."""
        self.moved_at = self.clock()
        if self.called_off and self.called_off == self.nonce:
            raise CalledOffError
