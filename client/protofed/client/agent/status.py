"""What a daemon is doing at this moment: written by its agent, read by its heartbeat."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from protofed.client.training.context import FitProgress, Throughput
from protofed.common.protocol.messages import Activity, Progress

# The site's own, and long: a server that chose it could tell one batch from the next, and count them.
MOVING_S = 60.0


class CalledOffError(Exception):
    """Nobody waits for the task any more."""


@dataclass
class DaemonStatus:
    """What the daemon is doing; the heartbeat reads it.

    Attributes:
        clock: monotonic seconds.
        moved_at: when training last got on, by that clock.
    """

    run: str = ""
    task_id: str = ""
    round: int = 0  # of the task that has the task_id
    activity: Activity = Activity.IDLE
    steps: FitProgress = field(default_factory=FitProgress)
    pace: Throughput = field(default_factory=Throughput)  # never in `progress`
    called_off: str = ""  # the task_id that the server no longer waits for
    heartbeat_s: float = 1.0  # the run's own, once there is a run
    clock: Callable[[], float] = time.monotonic
    moved_at: float = -math.inf

    def progress(self, bytes_moved: int, telemetry: Mapping[str, float] | None = None) -> Progress:
        """For a heartbeat: of training, the epoch, and whether it moved within `MOVING_S`.

        Args:
            telemetry: as far as the site's policy lets it pass.
        """
        moving, steps = self.activity is Activity.TRAINING and self.clock() - self.moved_at < MOVING_S, self.steps
        return Progress(
            self.task_id, self.activity, steps.epoch, steps.epochs, moving, bytes_moved, telemetry=telemetry or {}
        )

    def at_work(self) -> dict[str, str | int]:
        """For the log: run and round of the task that is worked on, if there is one."""
        return {"run": self.run, "round": self.round} if self.task_id else {}

    def check(self) -> None:
        """Between batches: notes that training moves. Raises CalledOffError if the server called this task off."""
        self.moved_at = self.clock()
        if self.called_off and self.called_off == self.task_id:
            raise CalledOffError
