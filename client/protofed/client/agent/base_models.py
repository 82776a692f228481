"""The models that tasks start from."""

from __future__ import annotations

from protofed.client.agent.heartbeat import DaemonStatus
from protofed.client.transport.link import Link, decode_base
from protofed.common.codec import Digest
from protofed.common.errors import ProtocolError
from protofed.common.failpoint import reach
from protofed.common.payload import Payload
from protofed.common.protocol.messages import Activity, Task


class BaseModelCache:
    """The newest one is kept."""

    def __init__(self, link: Link, now: DaemonStatus) -> None:
        self._link, self._now = link, now
        self._newest: tuple[Digest, Payload] | None = None

    def of(self, task: Task) -> Payload:
        """The task's base, fetched once; looking for something that is not in it raises CodecError."""
        if task.base_digest is None:
            raise ProtocolError(f"a {task.kind} task without a model to start from")
        if self._newest is None or self._newest[0] != task.base_digest:
            self._now.activity = Activity.DOWNLOADING
            self._newest = (task.base_digest, decode_base(self._link.fetch(task)))
            reach("fetched")
        return self._newest[1]

    def forget(self) -> None:
        """Another run begins."""
        self._newest = None
