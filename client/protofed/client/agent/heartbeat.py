"""Beside the agent, in threads of their own: heartbeats, and the watch for what people at the site decide.

Hours of training look alive, and a hung daemon does not.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping

import structlog

from protofed.client.policy.approval import Approvals
from protofed.client.policy.policy import ReleasedTelemetry
from protofed.client.site import DaemonStatus
from protofed.client.state.decisions import Decision, Decisions
from protofed.client.transport.link import Link
from protofed.common.config.recipe import Federation
from protofed.common.errors import FailureReason, ProtofedError, WithdrawnError
from protofed.common.protocol.messages import Activity, Progress, Signal

log = structlog.get_logger()
POLL_S = 0.5  # files are looked at so often; a decision takes effect within that time
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


class DecisionWatch(threading.Thread):
    """Ends the work for a run that the site has left, then moves all decisions to the audit log.

    In this order: a decision that is in the audit log has taken effect, which `protofed client deny` waits for.

    Args:
        status: what the agent is doing; `left_run` is set in it, which ends a fit.
        cancel: ends the calls of a run that are under way.
        record: writes a decision's line in the audit log.
    """

    def __init__(
        self,
        decisions: Decisions,
        approvals: Approvals,
        status: DaemonStatus,
        link: Link,
        cancel: Callable[[str], None],
        record: Callable[[Decision], None],
    ) -> None:
        super().__init__(name="decisions", daemon=True)  # a process that crashes must not live on by it
        self._decisions, self._approvals, self._status = decisions, approvals, status
        self._link, self._cancel, self._record = link, cancel, record
        self._end = threading.Event()

    def run(self) -> None:
        """Look every `POLL_S` until `stop`."""
        while not self._end.wait(POLL_S):
            try:
                self.look()
            except ProtofedError as error:  # a full disk, or a folder that cannot be read now: it looks again
                log.warning("a decision could not be carried out yet", why=str(error))

    def stop(self) -> None:
        """End the thread after the look that is under way."""
        self._end.set()

    def look(self) -> None:
        """Carry out what has been decided since the last look.

        Raises:
            StateError: a file cannot be read, or the audit log not be written.
        """
        waiting = self._decisions.waiting()  # first: one that comes during this look has not taken effect by it
        run, task_id = self._status.run, self._status.task_id
        try:
            if run:
                self._approvals.check_not_out(run)
            self._status.left_run = ""
        except WithdrawnError:
            self._leave(run, task_id)
        self._decisions.move(waiting, self._record)

    def _leave(self, run: str, task_id: str) -> None:
        if self._status.left_run == run:
            return
        log.warning("this site leaves the run", run=run)
        self._status.left_run = run
        self._cancel(run)
        if task_id:
            # Not only by the agent, which may take a batch more to notice. The server closes the task by it, and then
            # takes nothing of it any more; a message on the connection that was ended came before, or comes too late.
            self._link.beat(run, Progress(task_id, Activity.FAILED, failure=FailureReason.WITHDRAWN))
