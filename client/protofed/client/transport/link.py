"""The wire as the agent sees it: one protocol that gRPC and the simulation implement."""

from __future__ import annotations

from typing import Protocol

from protofed.client.policy.policy import Released, ReleasedScores
from protofed.common.protocol.messages import Assignment, Finished, PauseReason, Progress, Receipt, Signal, Task, Wait


class Link(Protocol):
    """One daemon's connection to the server. Calls block until they are answered, however long the server is away.

    Raises:
        NotEnrolledError: from any call: enroll again.
        FencedError: from any call: a newer daemon of this site has taken over.
        ProtocolError: from any call: the server refuses it, and would refuse it again.
    """

    def enroll(self, pause_reason: PauseReason = PauseReason.NONE, wait_s: float = 0.0) -> Assignment | Finished:
        """Enroll, with the reason why this daemon takes no tasks yet; returns the run to work on.

        If there is none, the server may wait `wait_s` seconds for one before it answers.
        """

    def next_task(self, run: str, wait_s: float) -> Task | Wait | Finished:
        """Ask for a task; the server answers after `wait_s` seconds at the latest."""

    def fetch(self, task: Task) -> bytes:
        """The task's base blob, its digest checked."""

    def push(self, task: Task, released: Released) -> Receipt:
        """Upload an update and commit it; returns the server's receipt."""

    def report(self, task: Task, released: ReleasedScores) -> None:
        """Report the scores of a SCORE task."""

    def beat(self, run: str, progress: Progress) -> Signal:
        """Send one heartbeat. A lost one is not repeated and answers CONTINUE."""
