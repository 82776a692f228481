"""The orders that people at a site give, on the command line and on the site's page.

Each is in force once its file is written; then it is recorded in the site's audit log with the name of who gave it.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta
from enum import Enum
from pathlib import Path
from time import monotonic, sleep

from protofed.client.policy.approval import FOLDER, OUT, Approvals, Offer
from protofed.client.policy.pause import FILE, Pause, SitePause
from protofed.client.secure_aggregation.partners import Partners
from protofed.client.secure_aggregation.sessions import FOLDER as SUMS
from protofed.client.secure_aggregation.sessions import forget_group
from protofed.client.state.decisions import FOLDER as DECISIONS
from protofed.client.state.decisions import Act, Decision, Decisions
from protofed.client.transport.audit import FILE as AUDIT_LOG
from protofed.client.transport.audit import ClientAudit
from protofed.common.clock import stamp, utc_now
from protofed.common.errors import ConfigError, StateError, short
from protofed.common.storage import files
from protofed.common.storage.journal import SEGMENT_BYTES, Journal
from protofed.deploy.site.partners import PartnersView

WAIT_S = 30.0  # for a daemon, which looks every half second and may wait 10 s for an answer of its server
_LOOK_S = 0.1


class Noticed(Enum):
    """Who has written the decision's line in the audit log."""

    DAEMON = "daemon"
    NO_DAEMON = "no daemon runs"  # this process
    NOT_YET = "the daemon has not looked"


def user_name() -> str:
    """The name of the user who decides, also behind sudo; empty: this machine has no name for him."""
    if name := os.environ.get("SUDO_USER"):
        return name
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # as in a container that runs under a number
        return ""


def check_state(state: Path) -> None:
    """Check that the state folder is there: a mistyped one must not be made.

    Raises:
        ConfigError: there is no such folder.
    """
    if not state.is_dir():
        raise ConfigError(f"there is no folder {state}; expected the --state of the site's daemon")


def act_as_owner(state: Path) -> None:
    """As root, go on as the owner of the state folder: its daemon could not read what root writes.

    Raises:
        ConfigError: there is no such folder.
    """
    check_state(state)
    owner = state.stat()
    if os.geteuid() == 0 and owner.st_uid != 0:
        os.setegid(owner.st_gid)
        os.seteuid(owner.st_uid)


def record(state: Path, decision: Decision) -> Noticed:
    """Bring a decision, which is in force already, into the site's audit log, and wait until the daemon has noticed it.

    Raises:
        StateError: the state folder cannot be written.
    """
    decisions, until = Decisions(state / DECISIONS), monotonic() + WAIT_S
    path = decisions.add(decision)
    while path.exists():
        if _write_lines(state, decisions):
            return Noticed.NO_DAEMON
        if monotonic() >= until:
            return Noticed.NOT_YET
        sleep(_LOOK_S)
    return Noticed.DAEMON


def _write_lines(state: Path, decisions: Decisions) -> bool:
    """Write the lines in this process; False: a daemon has the folder, and does it."""
    try:
        lock = files.Lock(state, wait_s=0)  # a daemon that has it does this by itself: nothing to wait for
    except StateError:
        return False
    try:
        journal = Journal(state / AUDIT_LOG, SEGMENT_BYTES)
        try:
            audit = ClientAudit(journal)
            decisions.move(decisions.waiting(), lambda decision: audit.decision(decision.act.value, decision.facts()))
        finally:
            journal.close()
    finally:
        lock.release()
    return True


LONGEST_REASON = 300


def open_approvals(state: Path) -> Approvals:
    """The approvals of a site.

    Raises:
        ConfigError: there is no such state folder.
    """
    check_state(state)
    return Approvals(state / FOLDER)


def open_pause(state: Path) -> SitePause:
    """The pause of a site."""
    return SitePause(state / FILE)


def is_out(approvals: Approvals, offer: Offer) -> bool:
    """Whether the site was taken out of a run; StateError if that cannot be read."""
    return approvals.status(offer.run, offer.recipe) in OUT


def approve(state: Path, offer: Offer) -> Noticed:
    """Approve this recipe of a run, and no other; takes back a denial.

    Raises:
        ConfigError: there is no such state folder.
        StateError: it cannot be written.
    """
    act_as_owner(state)
    open_approvals(state).approve(offer, user_name())
    return _record(state, Act.APPROVE, offer)


def confirm_partners(state: Path, code: str) -> Noticed:
    """Confirm the list of partners that the server offers; a group with a site that it lacks ends.

    Raises:
        ConfigError: as of `Partners.confirmable`.
        StateError: it cannot be written.
    """
    act_as_owner(state)
    view = PartnersView.of(state)
    confirmed = Partners(state).confirm(view.own, code, user_name())
    if view.leaving:
        forget_group(state / SUMS)
    listed = confirmed.consortium
    facts = {"partners": ", ".join(sorted(listed.identities)), "code": listed.code, "group": ", ".join(view.leaving)}
    return record(state, Decision(Act.CONFIRM, confirmed.at, confirmed.by, **facts))


def leave(state: Path, offer: Offer, announce: Callable[[bool], object] = lambda _: None) -> Noticed:
    """Take the site out of a run: withdraw it if it took part, else deny the run.

    Args:
        announce: called once it is in force, with whether the site took part, before the daemon is waited for.

    Raises:
        As `approve`.
    """
    act_as_owner(state)
    approvals = open_approvals(state)
    took_part = approvals.took_part(offer.run)
    approvals.deny(offer, user_name(), took_part=took_part)
    announce(took_part)
    return _record(state, Act.WITHDRAW if took_part else Act.DENY, offer)


def pause(
    state: Path, end: datetime | None, reason: str = "", announce: Callable[[Pause], object] = lambda _: None
) -> Noticed:
    """Take no new task until `end` (UTC), or until `resume`.

    Args:
        reason: for the site's own audit log; empty: none.
        announce: as of `leave`, with the pause.

    Raises:
        As `approve`.
    """
    act_as_owner(state)
    new_pause = open_pause(state).begin(user_name(), end)
    announce(new_pause)
    until = "" if end is None else stamp(end)
    words = short(reason, LONGEST_REASON)
    return record(state, Decision(Act.PAUSE, new_pause.at, new_pause.by, until=until, reason=words))


def resume(state: Path, announce: Callable[[Pause], object] = lambda _: None) -> Noticed | None:
    """End the pause; None: there was none, and nothing is recorded.

    Args:
        announce: as of `leave`, with the pause that was in force.

    Raises:
        As `approve`.
    """
    act_as_owner(state)
    if (ended := open_pause(state).end()) is None:
        return None
    announce(ended)
    return record(state, Decision(Act.RESUME, stamp(utc_now()), user_name()))


def noticed_text(noticed: Noticed) -> str:
    """Whether the daemon knows of an order, in words."""
    match noticed:
        case Noticed.DAEMON:
            return "the daemon has noticed"
        case Noticed.NO_DAEMON:
            return "no daemon runs here now; the order holds for the next one"
        case Noticed.NOT_YET:
            return (
                f"the order is in force, but the daemon has not confirmed it within {WAIT_S:.0f} s. It may still "
                "send what it had started to send. Look at its log, or stop it"
            )


def _record(state: Path, act: Act, offer: Offer) -> Noticed:
    return record(state, Decision(act, stamp(utc_now()), user_name(), offer.run, offer.digest))


_DURATION = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,4})h)?(?:(\d{1,5})m(?:in)?)?")
LONGEST = timedelta(days=366)


def pause_end(text: str, now: datetime) -> datetime:
    """The time that `text` means, UTC: a time of day (the next one), a date and time, or a duration from now.

    Args:
        text: without a zone, it is in UTC, as a policy's `schedule` is.
        now: the current time, UTC.

    Raises:
        ConfigError: it is none of these, or not in the coming year.
    """
    end = _after(text, now) or _time_of_day(text, now) or _date(text)
    if end is None:
        raise ConfigError(
            f"--until '{short(text)}': expected a time of day (18:00), a date and time (2026-11-24T06:00), both in "
            "UTC, or a duration (90m, 2h30m, 3d)"
        )
    if not now < end <= now + LONGEST:
        raise ConfigError(f"--until '{short(text)}' is {end:%Y-%m-%dT%H:%M:%SZ}: expected a time of the coming year")
    return end


def _after(text: str, now: datetime) -> datetime | None:
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or not any(match.groups()):
        return None
    days, hours, minutes = (int(number or 0) for number in match.groups())
    return now + timedelta(days=days, hours=hours, minutes=minutes)


def _time_of_day(text: str, now: datetime) -> datetime | None:
    if not re.fullmatch(r"\d{1,2}:\d{2}", text.strip()):
        return None
    try:
        at = datetime.combine(now.date(), time.fromisoformat(text.strip().zfill(5)), UTC)
    except ValueError:
        return None
    return at if at > now else at + timedelta(days=1)


def _date(text: str) -> datetime | None:
    try:
        at = datetime.fromisoformat(text.strip())
        return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError):  # the latter: in the first or last hours that there are
        return None
