"""Carries out at once what people at the site decide while the daemon works, from a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from protofed.client.policy.approval import Approvals
from protofed.client.site import DaemonStatus
from protofed.client.state.decisions import Decision, Decisions
from protofed.client.transport.link import Link
from protofed.common.errors import FailureReason, ProtofedError, WithdrawnError
from protofed.common.protocol.messages import Activity, Progress

log = structlog.get_logger()
POLL_S = 0.5  # files are looked at so often; a decision takes effect within that time


class DecisionWatch(threading.Thread):
    """Ends the work for a run that the site has left, then moves all decisions to the audit log.

    In this order: a decision that is in the audit log has taken effect, which `protofed client withdraw` waits for.

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
