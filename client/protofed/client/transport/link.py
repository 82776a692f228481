"""The wire as the client sees it."""

from __future__ import annotations

from typing import Any, Protocol

from protofed.client.privacy.policy import Released, ReleasedScores
from protofed.common import codec
from protofed.common.errors import CodecError
from protofed.common.payload import Payload
from protofed.common.protocol.messages import Assignment, Finished, PauseReason, Progress, Receipt, Signal, Task, Wait


class Link(Protocol):
    """One daemon's connection; every call returns only when it has an answer, however long the server is away.

    Raises:
        NotEnrolled: from any call: enroll again.
        Fenced: from any call: a newer daemon of this site has taken over.
        ProtocolError: the server refuses the call for good.
    """

    def enroll(self, hold: PauseReason = PauseReason.NONE) -> Assignment | Finished:
        """Say hello, and why this daemon takes no task yet; the run to work on."""

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


def received(data: bytes) -> Payload:
    """What was fetched; looking for something that is not in it raises CodecError.

    Raises:
        CodecError: the bytes are no payload.
    """
    return _Received({part: _Received(tensors) for part, tensors in codec.decode(data).items()})


class _Received(dict[Any, Any]):
    """A payload, or a part of one, of which a method takes what it needs: a task without it is declined."""

    def __missing__(self, name: Any) -> Any:
        raise CodecError(f"the model that was received has no '{name}'")
