"""The agent, a client daemon's loop: enroll, take a task, have it worked on; over gRPC and in simulations."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from protofed.client.agent.computation import Computation, Elsewhere, Nowhere
from protofed.client.agent.dp_budget import Spending
from protofed.client.agent.enrollment import Enrollment, TaskGate
from protofed.client.agent.run_work import RunWork
from protofed.client.policy.rules import PolicyRules
from protofed.client.secure_aggregation.membership import Membership
from protofed.client.site import Site as Site
from protofed.client.site import is_offered_summed
from protofed.client.status import DaemonStatus
from protofed.client.transport.link import Link
from protofed.common.errors import (
    ExcludedError,
    FailureReason,
    IncidentError,
    NotEnrolledError,
    PolicyViolationError,
    ProtocolError,
    RevokedError,
)
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import Assignment, Finished, Role, Task, Wait

EXCLUDED_PAUSE_S = 30.0
INCIDENT_PAUSE_S = 2.0
# Errors after which the site enrolls again, and the pause before it: the server has restarted, the operator excluded
# this site for now, or a call failed unforeseen at the server.
ENROLL_AGAIN_AFTER_S: dict[type[ProtocolError], float] = {
    NotEnrolledError: 0.0,
    ExcludedError: EXCLUDED_PAUSE_S,
    IncidentError: INCIDENT_PAUSE_S,
}


class RefusalLog:
    """Logs why a site enrolls again; of what lasts, such as an exclusion, its begin and its end."""

    def __init__(self, site: SiteId) -> None:
        self._site = site
        self._lasting = ""  # the refusal that was logged

    def note(self, error: ProtocolError) -> None:
        """Log one of the errors of `ENROLL_AGAIN_AFTER_S`."""
        if isinstance(error, NotEnrolledError):
            log.info("enrolling again", site=self._site, why=str(error))  # a restart needs no attention
        elif not isinstance(error, ExcludedError):
            log.warning("enrolling again", site=self._site, why=str(error))
        elif self._lasting != str(error):
            self._lasting = str(error)
            log.warning("the server refuses this site; waiting until it does not", site=self._site, why=str(error))

    def end(self) -> None:
        """The site has enrolled."""
        if self._lasting:
            self._lasting = ""
            log.info("the server takes this site again", site=self._site)


log = structlog.get_logger()
REJECTED_PAUSE_S = 1.0  # so that a server that repeats a wrong task is not asked in a tight loop


class Agent:
    """Works for one site on the tasks that the server gives it; single-threaded but for the heartbeat.

    Args:
        status: shared with the heartbeat and the metrics; None in a simulation, which has neither.
        pause: sleeps for so many seconds.
        gate: decides when the site takes tasks; None: by its policy and its approvals.
        on_refusal: called with each update, or run, that the site's policy refused.
        on_withheld: called with each update that stays here without the server's knowing.
        elsewhere: computes for the site in other processes; None: all is computed here.
        on_spending: called with each fit with noise that is about to begin.
        membership: of secure sums; None: this site takes part in no run with them.
    """

    def __init__(
        self,
        site: Site,
        link: Link,
        status: DaemonStatus | None = None,
        pause: Callable[[float], None] = time.sleep,
        gate: TaskGate | None = None,
        on_refusal: Callable[[Task, PolicyViolationError], None] = lambda _task, _violation: None,
        elsewhere: Elsewhere | None = None,
        on_spending: Callable[[Spending], None] = lambda _spending: None,
        on_withheld: Callable[[Task, PolicyViolationError], None] = lambda _task, _violation: None,
        membership: Membership | None = None,
    ) -> None:
        self._site, self._link, self._status = site, link, status or DaemonStatus()
        self._pause = pause
        own_gate = TaskGate(
            self._rules,
            site.store.approvals,
            pause=site.store.pause,
            origin=lambda: site.policy.origin,
            budget=self._no_budget,
            partners=self._unconfirmed,
            trains=Role.TRAINER in site.roles,
        )
        self._enrollment = Enrollment(link, gate or own_gate)
        self._assignment: Assignment | None = None
        self._enrolled = False
        self._refusals = RefusalLog(site.name)
        told = on_refusal, on_withheld, on_spending
        others = elsewhere or Nowhere()
        self._work = RunWork(site, link, self._status, self._enrollment.accept, *told, others, membership)

    @property
    def name(self) -> SiteId:
        """The site that it works for."""
        return self._site.name

    def step(self, wait_s: float, run_wait_s: float = 0.0) -> Task | Wait | Finished:
        """Enroll if need be, ask for a task and work on it; returns the server's answer.

        The daemon calls this in a loop until `Finished`, or until it is stopped.

        Args:
            wait_s: how many seconds the server may wait for a task to appear.
            run_wait_s: the same for a run, if none is queued.

        Raises:
            FencedError: a newer daemon of this site has taken over.
            RevokedError: this site's certificate was revoked.
        """
        try:
            if not self._takes_tasks() and (instead := self._enroll(run_wait_s)) is not None:
                return instead
            assert self._assignment is not None  # noqa: S101  (enrolled)
            with self._status.asking():
                answer = self._link.next_task(self._assignment.run, wait_s)
            if isinstance(answer, Task):
                if not self._work.is_new(answer, self._assignment.run):
                    return self._wait(REJECTED_PAUSE_S)
                if not self._takes_tasks():  # the schedule ended, or the run was denied, while the server waited
                    self._decline_if_left(answer)
                    return self._wait(0.0)
                self._work.work_on(answer)
        except RevokedError:
            self._enrolled = False  # a new certificate enrolls: the server may still know the daemon by the former one
            raise
        except tuple(ENROLL_AGAIN_AFTER_S) as error:
            self._refusals.note(error)
            self._enrolled = False
            return self._wait(ENROLL_AGAIN_AFTER_S[type(error)])
        if isinstance(answer, Finished):
            log.info("run finished", run=self._assignment.run, reason=answer.reason)
            self._enrolled = False
            self._enrollment.leave()
            self._work.over(self._assignment.run)
        return answer

    def ahead(self, task: Task) -> list[Computation]:
        """As `RunWork.ahead`."""
        return self._work.ahead(task)

    def _takes_tasks(self) -> bool:
        """Whether the site is enrolled, and its gate is still open for the run."""
        open_ = self._enrollment.may_stay()  # first: a policy that has changed ends the enrolment
        self._enrolled = self._enrolled and open_
        return self._enrolled

    def _rules(self) -> PolicyRules:
        """The policy as its file says now; the run is checked again under one that has changed.

        Raises:
            ConfigError, PolicyViolationError: it cannot be read.
        """
        if self._site.refresh_policy():
            log.info("the policy has changed: the run is checked again")
            self._assignment, self._enrolled = None, False
        return self._site.policy.rules

    def _no_budget(self, offered: Assignment) -> str:
        """Why the privacy budget has no further round of a run; empty: it has, or the run is not prepared yet."""
        return self._work.no_budget(offered.run) if offered == self._assignment else ""

    def _unconfirmed(self, offered: Assignment | None) -> str:
        """Why the site is summed with nobody; empty: it is, or the run has no secure sums."""
        member = self._work.sums.membership
        if member is None or (offered is not None and not is_offered_summed(self._site, offered)):
            return ""
        required = self._site.policy.rules.partners == "confirmed"
        return member.partners.problem(required=required) if offered is not None or required else ""

    def _decline_if_left(self, task: Task) -> None:
        """Decline a task of a run that the site has left; otherwise the server learns at the next enrolling."""
        if self._enrollment.left_run() is not None:
            self._work.decline(task, FailureReason.WITHDRAWN, "this site has left the run; no data were read")

    def _wait(self, pause_s: float) -> Wait:
        self._pause(pause_s)
        return Wait(0.0)

    def _enroll(self, run_wait_s: float) -> Finished | Wait | None:
        with self._status.asking():
            answer = self._enrollment.enroll(run_wait_s)
        self._refusals.end()
        if (left := self._enrollment.left_run()) is not None:
            self._work.abandon(left)
        if not isinstance(answer, Assignment):
            return self._wait(answer.retry_after_s) if isinstance(answer, Wait) else answer
        # Before the data are loaded, which may take longer than a server waits for a sign of life. A site that had left
        # the run has come back; from now on the decision watch sees whether it leaves it again.
        self._status.run, self._status.left_run = answer.run, ""
        if answer != self._assignment:
            self._work.prepare(answer)
        self._assignment, self._enrolled = answer, True
        self._work.hand_in_staged(answer.run)
        return None if self._takes_tasks() else self._wait(0.0)  # what a round costs is known only now
