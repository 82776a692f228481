"""The base models that tasks start from."""

from __future__ import annotations

from collections.abc import Callable

from protofed.client.agent.heartbeat import DaemonStatus
from protofed.client.transport.link import Link, decode_base
from protofed.common.codec import Digest
from protofed.common.errors import ProtocolError
from protofed.common.failpoint import reach
from protofed.common.payload import Payload
from protofed.common.protocol.messages import Activity, Task


class BaseModelCache:
    """Holds the newest base: the FIT and the SCORE task of a round often start from the same one.

    Args:
        check: called with each base before it is used, also with a cached one; raises what refuses it.
    """

    def __init__(self, link: Link, status: DaemonStatus, check: Callable[[Task, Payload], None]) -> None:
        self._link, self._status, self._check = link, status, check
        self._newest: tuple[Digest, Payload] | None = None

    def get(self, task: Task) -> Payload:
        """The task's base, fetched unless it is the cached one; see `decode_base` for lookups in it.

        Raises:
            ProtocolError: the task names no base.
            CodecError: the base is no payload.
            PolicyViolationError: the check refuses it.
        """
        if task.base_digest is None:
            raise ProtocolError(f"a {task.kind} task without a model to start from")
        if self._newest is None or self._newest[0] != task.base_digest:
            self._status.activity = Activity.DOWNLOADING
            self._newest = (task.base_digest, decode_base(self._link.fetch(task)))
            reach("fetched")
        self._check(task, self._newest[1])
        return self._newest[1]

    def clear(self) -> None:
        """Free the memory; called when the daemon turns to another run."""
        self._newest = None
