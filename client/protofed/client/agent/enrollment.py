"""Whether a site takes tasks, and how it says so to the server."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import structlog

from protofed.client.privacy.approval import Approvals, ApprovalStatus
from protofed.client.privacy.rules import PolicyRules
from protofed.client.privacy.schedule import is_open, opens
from protofed.client.transport.link import Link
from protofed.common.clock import utc_now
from protofed.common.errors import StateError
from protofed.common.protocol.messages import Assignment, Finished, PauseReason, Wait

log = structlog.get_logger()
HELD_PAUSE_S = 5.0


class TaskGate:
    """Whether the site takes tasks at this moment: its policy's schedule, and the approval of the run.

    Args:
        approvals: of this site; None: nothing is ever approved.
        now: in UTC.
    """

    def __init__(self, rules: PolicyRules, approvals: Approvals | None, now: Callable[[], datetime] = utc_now) -> None:
        self._rules, self._approvals, self._now = rules, approvals, now

    def hold(self, offered: Assignment | None) -> PauseReason:
        """Why not; NONE: it does. A run that is not known yet is not approved."""
        if not is_open(self._rules.schedule, self._now()):
            return PauseReason.SCHEDULE
        status = self._status(offered)
        automatic = self._rules.approval == "automatic" and status is not ApprovalStatus.DENIED
        return PauseReason.NONE if automatic or status is ApprovalStatus.APPROVED else PauseReason.APPROVAL

    def note(self, offered: Assignment) -> None:
        """Let whoever approves runs see this one. A disk that is full stops no run that needs no approval."""
        if self._approvals is not None:
            try:
                self._approvals.note(offered)
            except StateError as error:
                log.warning("what the server offers could not be written down", run=offered.run, why=str(error))

    def _status(self, offered: Assignment | None) -> ApprovalStatus:
        if offered is None or self._approvals is None:
            return ApprovalStatus.WAITING
        return self._approvals.status(offered.run, offered.recipe)

    def until(self, hold: PauseReason) -> str:
        """What has to happen, in words."""
        match hold:
            case PauseReason.SCHEDULE:
                return f"until {opens(self._rules.schedule, self._now()):%Y-%m-%d %H:%M} UTC"
            case PauseReason.APPROVAL:
                return "until `protofed client approve` lets it take part"
            case PauseReason.NONE:
                return ""


class Enrollment:
    """A daemon's way in: it enrolls as held until it may take tasks, then as one that does.

    A daemon whose runs need approval says hello as held before it knows the run, so that no round counts on it.
    """

    def __init__(self, link: Link, door: TaskGate) -> None:
        self._link, self._door = link, door
        self._offered: Assignment | None = None
        self._held = PauseReason.NONE

    def enroll(self) -> Assignment | Finished | Wait:
        """The run whose tasks this site takes from now on; or how long to wait before asking again."""
        said = self._door.hold(self._offered)
        answer = self._link.enroll(said)
        if isinstance(answer, Finished):
            self._offered = None
            return answer
        self._offered = answer
        self._door.note(answer)
        hold = self._door.hold(answer)
        if hold is not self._held:
            if hold is PauseReason.NONE:
                log.info("this site takes tasks", run=answer.run)
            else:
                log.info("this site takes no task yet", run=answer.run, hold=hold.value, why=self._door.until(hold))
            self._held = hold
        return answer if hold is said is PauseReason.NONE else Wait(HELD_PAUSE_S if hold is said else 0.0)

    def may_stay(self) -> bool:
        """Whether the site still takes tasks of the run that it enrolled for."""
        return self._door.hold(self._offered) is PauseReason.NONE

    def leave(self) -> None:
        """The run has ended; the next one is not known."""
        self._offered = None
