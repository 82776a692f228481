"""The wire as the client sees it."""

from __future__ import annotations

from typing import Protocol

from protofed.client.policy import Released, ReleasedScores
from protofed.common.task import Assignment, Finished, Progress, Receipt, Signal, Task, Wait


class Link(Protocol):
    """One daemon's connection; every call returns only when it has an answer, however long the server is away.

    Raises:
        NotEnrolled: from any call: enroll again.
        Fenced: from any call: a newer daemon of this site has taken over.
        ProtocolError: the server refuses the call for good.
    """

    def enroll(self) -> Assignment | Finished:
        """Say hello; the run to work on."""

    def next_task(self, run: str, wait_s: float) -> Task | Wait | Finished:
        """What to do now; waits up to `wait_s` for it."""

    def fetch(self, task: Task) -> bytes:
        """The task's base blob, its digest checked."""

    def push(self, task: Task, released: Released) -> Receipt:
        """Upload and commit; the verdict."""

    def report(self, task: Task, released: ReleasedScores) -> None:
        """Hand in scores."""

    def beat(self, run: str, progress: Progress) -> Signal:
        """Say how far this site is. Not repeated when it is lost."""
