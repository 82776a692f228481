"""Whether a site takes tasks at present, and how it enrolls at the server accordingly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

import structlog

from protofed.client.policy.approval import OUT, Approvals, ApprovalStatus
from protofed.client.policy.pause import Pause, SitePause
from protofed.client.policy.policy import UNREADABLE, PolicyOrigin
from protofed.client.policy.rules import PolicyRules, Window, is_open, next_opening
from protofed.client.transport.link import Link
from protofed.common.errors import StateError
from protofed.common.forms import utc_now
from protofed.common.protocol.messages import Assignment, Finished, PauseReason, Wait

log = structlog.get_logger()
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
        partners: why the site is summed with nobody in a run, which is None if it is not known yet; empty: it is.
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
                log.warning("what the server offers could not be written down", run=offered.run, why=str(error))

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
                    "until `protofed client approve`: the run names other classes than the runs before, and from run "
                    "to run a server could try out which of them this site has"
                )
            case PauseReason.APPROVAL:
                return "until `protofed client approve` lets it take part"
            case PauseReason.PAUSED:
                return "until `protofed client resume`" if self._pause is None else self._pause.end()
            case PauseReason.WITHDRAWN:
                return "a person here denied the run, or left it: until `protofed client approve` takes that back"
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
