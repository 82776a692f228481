"""What a daemon is doing at this moment: written by its agent, read by its heartbeat."""

from __future__ import annotations

from dataclasses import dataclass, field

from protofed.client.local import Steps
from protofed.common.task import Activity, Progress


class CalledOffError(Exception):
    """Nobody waits for the task any more."""


@dataclass
class Now:
    """What the daemon is doing; the heartbeat reads it."""

    run: str = ""
    nonce: str = ""
    activity: Activity = Activity.IDLE
    steps: Steps = field(default_factory=Steps)
    called_off: str = ""  # the nonce that the server no longer waits for
    heartbeat_s: float = 1.0  # the run's own, once there is a run

    def progress(self, bytes_moved: int) -> Progress:
        """For a heartbeat."""
        s = self.steps
        return Progress(self.nonce, self.activity, s.epoch, s.epochs, s.batch, s.batches, bytes_moved)

    def check(self) -> None:
        """Raises CalledOffError if the server called this task off."""
        if self.called_off and self.called_off == self.nonce:
            raise CalledOffError
