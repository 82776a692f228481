"""Heartbeats, from a thread of their own: hours of training look alive, and a hung daemon does not."""

from __future__ import annotations

import threading
from collections.abc import Callable

from protofed.client.agent.status import DaemonStatus
from protofed.client.privacy.policy import ReleasedTelemetry
from protofed.client.transport.link import Link
from protofed.common.protocol.messages import Signal


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
