"""The agent, a client daemon's loop: enroll while the site takes tasks, take one, have it worked on.

Over gRPC and in simulations. `TaskGate` decides when the site takes tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime

import structlog

from protofed.client.agent.computation import Computation, NoRemoteExecutor, RemoteExecutor
from protofed.client.agent.run_work import RunWork
from protofed.client.agent.task_tools import Spending
from protofed.client.policy.approval import OUT, Approvals, ApprovalStatus
from protofed.client.policy.pause import Pause, SitePause
from protofed.client.policy.policy import UNREADABLE, PolicyOrigin
from protofed.client.policy.rules import PolicyRules, Window, is_open, next_opening
from protofed.client.secure_aggregation.partners import Membership
from protofed.client.site import DaemonStatus, is_offered_aggregated
from protofed.client.site import Site as Site
from protofed.client.transport.link import Link
from protofed.common.clock import utc_now
from protofed.common.errors import (
    ExcludedError,
    FailureReason,
    IncidentError,
    NotEnrolledError,
    PolicyViolationError,
    ProtocolError,
    RevokedError,
    StateError,
)
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import Assignment, Finished, PauseReason, Role, Task, Wait

EXCLUDED_PAUSE_S = 30.0
INCIDENT_PAUSE_S = 2.0
# Errors after which the site enrolls again, and the pause before it: the server has restarted, the operator excluded
# this site for now, or a call failed unforeseen at the server.
ENROLL_AGAIN_AFTER_S: dict[type[ProtocolError], float] = {
    NotEnrolledError: 0.0,
    ExcludedError: EXCLUDED_PAUSE_S,
    IncidentError: INCIDENT_PAUSE_S,
}
log = structlog.get_logger()
REJECTED_PAUSE_S = 1.0  # so that a server that repeats a wrong task is not asked in a tight loop
PAUSED_RETRY_S = 5.0


class TaskGate:
    """Decides whether the site takes tasks now: by a pause, its policy's schedule and budget, partners and approvals.

    Args:
        rules: the policy's rules as they are now; raises ConfigError or PolicyViolationError while it cannot be read.
        approvals: of this site; None: no run is ever approved.
        now: the current time, UTC.
        pause: of this site; None: it cannot be paused.
        origin: where `rules` come from, for the record of what the policy approves by itself.
        trains: the site is a trainer: which classes it has must not be tried out.
        budget: why the privacy budget allows no further round of a run; empty: it does, or is not known yet.
        partners: why no partner is aggregated with this site in a run, which is None if it is not known yet; empty: one
            is.
    """

    def __init__(
        self,
        rules: Callable[[], PolicyRules],
        approvals: Approvals | None,
        now: Callable[[], datetime] = utc_now,
        pause: SitePause | None = None,
        origin: Callable[[], PolicyOrigin] = PolicyOrigin,
        budget: Callable[[Assignment], str] = lambda _offered: "",
        partners: Callable[[Assignment | None], str] = lambda _offered: "",
        *,
        trains: bool = True,
    ) -> None:
        self._rules, self._approvals, self._now = rules, approvals, now
        self._site_pause, self._origin, self._budget, self._trains = pause, origin, budget, trains
        self._other_classes = False  # whether the run names other classes than those before
        self._partners, self._unconfirmed = partners, ""  # why it is summed with nobody
        self._overspent = ""  # why there is no budget for another round
        self._pause: Pause | None = None  # as it was last read
        self._problem = ""  # why the policy cannot be read
        self._schedule: Sequence[Window] = ()  # as it was last read

    def pause_reason(self, offered: Assignment | None) -> PauseReason:
        """Why the site takes no tasks of the offered run; NONE: it takes them.

        Args:
            offered: None: the run is not known yet, and so not approved.
        """
        if (rules := self._readable_rules()) is None:
            return PauseReason.POLICY
        self._pause = None if self._site_pause is None else self._site_pause.current()
        if self._pause is not None:
            return PauseReason.PAUSED
        if not is_open(rules.schedule, self._now()):
            return PauseReason.SCHEDULE
        status = self._status(offered)
        if status in OUT:  # that counts even where runs need no approval
            return PauseReason.WITHDRAWN
        if unconfirmed := self._partners(offered):
            self._unconfirmed = unconfirmed
            return PauseReason.PARTNERS
        if not self._approves(rules, offered) and status is not ApprovalStatus.APPROVED:
            return PauseReason.APPROVAL
        self._overspent = "" if offered is None else self._budget(offered)
        return PauseReason.BUDGET if self._overspent else PauseReason.NONE

    def is_out(self, offered: Assignment) -> bool:
        """Whether a person at the site has denied the run, or left it."""
        return self._status(offered) in OUT

    def presumed(self) -> Assignment | None:
        """The run that was offered last, if a person approved it: a restarted daemon presumes that it goes on."""
        offers = () if self._approvals is None else self._approvals.offers()[-1:]
        last = next((Assignment(offer.run, offer.recipe, min_cohort=offer.min_cohort) for offer in offers), None)
        return last if self._status(last) is ApprovalStatus.APPROVED else None

    def record_offer(self, offered: Assignment) -> None:
        """Record the run, and whether the policy approves it by itself, for `protofed client runs`."""
        self._record(offered, lambda approvals: self._record_offer(approvals, offered))

    def record_task(self, offered: Assignment) -> None:
        """Record that the site accepts a task of the run."""
        self._record(offered, lambda approvals: approvals.record_task(offered))

    def _record_offer(self, approvals: Approvals, offered: Assignment) -> None:
        approvals.record_offer(offered)
        if (rules := self._readable_rules()) is None:
            return
        if rules.secure == "required":
            approvals.learn_classes(offered)
        if self._approves(rules, offered):
            origin = self._origin()
            approvals.approve_by_policy(offered, origin.name, origin.digest)
        else:
            approvals.end_approval_by_policy(offered.run)

    def _approves(self, rules: PolicyRules, offered: Assignment | None) -> bool:
        """Whether the policy approves a run by itself: not one of other classes, where the server must not learn which
        of them the site has.
        """
        self._other_classes = (
            self._trains
            and rules.secure == "required"
            and offered is not None
            and self._approvals is not None
            and not self._approvals.knows_classes(offered)
        )
        return rules.approval == "automatic" and not self._other_classes

    def _record(self, offered: Assignment, write: Callable[[Approvals], None]) -> None:
        """Write for `protofed client runs`; a full disk is only logged, as most policies need no approval."""
        if self._approvals is not None:
            try:
                write(self._approvals)
            except StateError as error:
                log.warning("what the server offers could not be stored", run=offered.run, why=str(error))

    def _readable_rules(self) -> PolicyRules | None:
        """The policy's rules; None: it cannot be read, which is logged once, and again when it can."""
        problem, rules = "", None
        try:
            rules = self._rules()
            self._schedule = rules.schedule
        except UNREADABLE as error:
            problem = str(error)
        if problem and not self._problem:
            log.error("this site takes no task: its policy cannot be read", why=problem)
        if self._problem and not problem:
            log.info("the policy can be read again")
        self._problem = problem
        return rules

    def _status(self, offered: Assignment | None) -> ApprovalStatus:
        if offered is None or self._approvals is None:
            return ApprovalStatus.WAITING
        return self._approvals.status(offered.run, offered.recipe)

    def until(self, reason: PauseReason) -> str:
        """When a pause ends, in words for the log; empty for NONE."""
        match reason:
            case PauseReason.SCHEDULE:
                return f"until {next_opening(self._schedule, self._now()):%Y-%m-%d %H:%M} UTC"
            case PauseReason.APPROVAL if self._other_classes:
                return (
                    "until `protofed client approve`: the run names other classes than earlier runs. By naming "
                    "other classes in each run, a server could find out which classes this site has"
                )
            case PauseReason.APPROVAL:
                return "until `protofed client approve` lets it take part"
            case PauseReason.PAUSED:
                return "until `protofed client resume`" if self._pause is None else self._pause.end()
            case PauseReason.WITHDRAWN:
                return (
                    "a person here denied the run, or took the site out of it. `protofed client approve` lets the "
                    "site take part again"
                )
            case PauseReason.BUDGET:
                return f"its privacy budget: {self._overspent}"
            case PauseReason.PARTNERS:
                return self._unconfirmed
            case PauseReason.POLICY:
                return f"until its policy can be read: {self._problem}"
            case PauseReason.NONE:
                return ""


class Enrollment:
    """Enrolls the daemon as paused until its gate is open, then as one that takes tasks.

    The server counts only the latter among a round's sites. A daemon learns which run it is by enrolling: where runs
    need approval, it therefore enrolls as paused first. One that was restarted presumes the run that it was offered
    last: enrolling as paused would end the task that it was killed in.
    """

    def __init__(self, link: Link, gate: TaskGate) -> None:
        self._link, self._gate = link, gate
        self._offered: Assignment | None = None
        self._logged = PauseReason.NONE
        self._answered = False  # a first call is answered at once: until then nobody knows whether the server is there

    def enroll(self, wait_s: float = 0.0) -> Assignment | Finished | Wait:
        """The run whose tasks this site takes from now on; Wait: it is paused, enroll again after that time.

        Args:
            wait_s: how many seconds the server may wait for a run to be queued, if there is none.
        """
        reported = self._gate.pause_reason(self._offered if self._answered else self._gate.presumed())
        answer = self._link.enroll(reported, wait_s if self._answered else 0.0)
        self._answered = True
        if isinstance(answer, Finished):
            self._offered = None
            # The presumed run is over: what the server starts next must not count a site that nobody has asked yet.
            return answer if self._gate.pause_reason(None) is reported else Wait(0.0)
        self._offered = answer
        self._gate.record_offer(answer)
        reason = self._gate.pause_reason(answer)
        if reason is not self._logged:
            if reason is PauseReason.NONE:
                log.info("this site takes tasks", run=answer.run)
            else:
                log.info("this site takes no task yet", run=answer.run, hold=reason.value, why=self._gate.until(reason))
            self._logged = reason
        if reason is not reported:  # known only now that the run is: tell the server at once
            return Wait(0.0)
        return answer if reason is PauseReason.NONE else Wait(PAUSED_RETRY_S)

    def may_stay(self) -> bool:
        """Whether the gate is still open for the run that the site enrolled for."""
        return self._gate.pause_reason(self._offered) is PauseReason.NONE

    def left_run(self) -> str | None:
        """The run that the server offered, if a person at the site has denied it, or left it."""
        out = self._offered is not None and self._gate.is_out(self._offered)
        return self._offered.run if self._offered is not None and out else None

    def accept(self) -> None:
        """Called when the site begins with a task of the run that it enrolled for."""
        if self._offered is not None:
            self._gate.record_task(self._offered)

    def leave(self) -> None:
        """Forget the run, which has ended: the next one needs an approval of its own."""
        self._offered = None


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


class Agent:
    """Works for one site on the tasks that the server gives it; single-threaded but for the heartbeat.

    Args:
        status: shared with the heartbeat and the metrics; None in a simulation, which has neither.
        pause: sleeps for so many seconds.
        gate: decides when the site takes tasks; None: by its policy and its approvals.
        on_refusal: called with each update, or run, that the site's policy refused.
        on_withheld: called with each update that stays here without the server's knowing.
        remote: computes for the site in other processes; None: all is computed here.
        on_spending: called with each fit with noise that is about to begin.
        membership: of secure aggregation; None: this site takes part in no run with it.
    """

    def __init__(
        self,
        site: Site,
        link: Link,
        status: DaemonStatus | None = None,
        pause: Callable[[float], None] = time.sleep,
        gate: TaskGate | None = None,
        on_refusal: Callable[[Task, PolicyViolationError], None] = lambda _task, _violation: None,
        remote: RemoteExecutor | None = None,
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
        callbacks = on_refusal, on_withheld, on_spending
        executor = remote or NoRemoteExecutor()
        self._work = RunWork(site, link, self._status, self._enrollment.accept, *callbacks, executor, membership)

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

    def prefetch(self, task: Task) -> list[Computation]:
        """As `RunWork.prefetch`."""
        return self._work.prefetch(task)

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
        """Why no partner is aggregated with this site; empty: one is, or the run has no secure aggregation."""
        member = self._work.sums.membership
        if member is None or (offered is not None and not is_offered_aggregated(self._site, offered)):
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
        if (former_run := self._enrollment.left_run()) is not None:
            self._work.abandon(former_run)
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
