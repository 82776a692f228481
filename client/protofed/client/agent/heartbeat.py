"""Heartbeats, from a thread of their own: hours of training look alive, and a hung daemon does not."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping

from protofed.client.policy.policy import ReleasedTelemetry
from protofed.client.site import DaemonStatus
from protofed.client.transport.link import Link
from protofed.common.config.recipe import Federation
from protofed.common.protocol.messages import Activity, Signal

# Between two heartbeats, whatever the recipe says: with `heartbeat_s = 0.001` a daemon sent 80 a second, each a line of
# two audit logs. The server needs one within `stall_timeout_s` (120 s).
SHORTEST_S = 1.0
# While the agent's own call waits at the server, and is answered and made again every 20 s: that call says that the
# site is there, and a heartbeat only brings the numbers of its machine. None is sent if the policy releases none, but
# where the server counts a site as lost so soon that it might miss a call.
IDLE_S, CALLS_S = 60.0, 30.0


def idle_heartbeat_s(federation: Federation) -> float:
    """Seconds between the heartbeats of a daemon that waits for a task: two within the time after which it is lost."""
    return max(federation.heartbeat_s, min(IDLE_S, federation.stall_timeout_s / 2))


class Heartbeat(threading.Thread):
    """Sends a heartbeat every `status.heartbeat_s`, at least `SHORTEST_S`, while the daemon works for a run.

    Fewer (`status.idle_heartbeat_s`), or none, while the agent waits for a task and the server knows that it is idle.

    Args:
        status: what the agent is doing; the server's ABORT is stored in it.
        bytes_moved: by the link, since the daemon's start.
        telemetry: the numbers that the site's policy releases; None: none are sent.
    """

    def __init__(
        self,
        link: Link,
        status: DaemonStatus,
        bytes_moved: Callable[[], int],
        telemetry: Callable[[], ReleasedTelemetry] | None = None,
    ) -> None:
        # A daemon thread: a process that crashes must not live on by its heartbeats.
        super().__init__(name="heartbeat", daemon=True)
        self._link, self._status, self._bytes_moved, self._telemetry = link, status, bytes_moved, telemetry
        self._end = threading.Event()
        self._sent_at, self._sent = -math.inf, Activity.FAILED  # nothing was

    def run(self) -> None:
        """Send heartbeats until `stop`."""
        while not self._end.wait(max(SHORTEST_S, self._status.heartbeat_s)):
            if self._status.run and not self._rests(numbers := self._numbers()):
                progress = self._status.progress(self._bytes_moved(), numbers)
                self._sent_at, self._sent = self._status.clock(), progress.activity
                if self._link.beat(self._status.run, progress) is Signal.ABORT:
                    # The task of that heartbeat: the agent may have taken another one in the meantime.
                    self._status.aborted_task_id = progress.task_id

    def _numbers(self) -> Mapping[str, float]:
        return self._telemetry().numbers if self._telemetry else {}

    def _rests(self, numbers: Mapping[str, float]) -> bool:
        every_s = self._status.idle_heartbeat_s
        needless = not numbers and every_s >= CALLS_S
        recent = self._status.clock() - self._sent_at < every_s
        return (needless or recent) and self._status.asks and self._sent is Activity.IDLE

    def stop(self) -> None:
        """End the thread after the heartbeat that is being sent."""
        self._end.set()
