"""Heartbeats, from a thread of their own: hours of training look alive, and a hung daemon does not."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from protofed.client.privacy.policy import ReleasedTelemetry
from protofed.client.training.context import FitProgress, Throughput
from protofed.client.transport.link import Link
from protofed.common.protocol.messages import Activity, Progress, Signal

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


class Heartbeat(threading.Thread):
    """Beats while the daemon lives.

    Args:
        now: what the agent is doing; told here when the server called its task off.
        bytes_moved: of this daemon so far.
        telemetry: what the site's policy lets pass of its machine's numbers; else nothing is told of it.
    """

    def __init__(
        self,
        link: Link,
        now: DaemonStatus,
        bytes_moved: Callable[[], int],
        telemetry: Callable[[], ReleasedTelemetry] | None = None,
    ) -> None:
        super().__init__(name="pulse", daemon=True)
        self._link, self._now, self._bytes_moved, self._telemetry = link, now, bytes_moved, telemetry
        self._end = threading.Event()

    def run(self) -> None:
        """Beat until stopped."""
        while not self._end.wait(self._now.heartbeat_s):
            if self._now.run:
                numbers = self._telemetry().numbers if self._telemetry else {}
                progress = self._now.progress(self._bytes_moved(), numbers)
                if self._link.beat(self._now.run, progress) is Signal.ABORT:
                    self._now.called_off = progress.task_id

    def stop(self) -> None:
        """End after the beat that is under way."""
        self._end.set()
