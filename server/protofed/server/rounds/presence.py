"""Which sites' daemons talk to the server now, when each last made progress, and why a site is not there.

`Invitations` says which site has which task open.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from protofed.common.codec import Digest
from protofed.common.errors import ExcludedError, FencedError, NotEnrolledError
from protofed.common.failpoint import reach
from protofed.common.payload import SiteId
from protofed.common.pki.certificate import Party
from protofed.common.protocol.consortium import Member
from protofed.common.protocol.messages import PauseReason, Progress, Role, SumOf, TaskKind
from protofed.server.access.certificates import Certificates
from protofed.server.rounds.machine.waiting import NO_TRAINER
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.rows import TaskRow
from protofed.server.verdicts import EXCLUDED

NO_MEMBER = Member()


@dataclass(slots=True)
class _Presence:
    instance: str | None  # None: presumed alive, from before a restart; its heartbeats may be heard
    roles: frozenset[Role]  # claimed, and granted by the registration of the certificate
    mark: Hashable  # last value by which progress is told from repetition
    moved_at: float  # seconds of the presence's clock
    pause_reason: PauseReason = PauseReason.NONE  # as it enrolled
    latest: Progress | None = None
    work: Progress | None = None  # its newest report, until it asks for a task
    is_leaving: bool = False  # said since then, in place of doing a task
    member: Member = NO_MEMBER

    @property
    def reason(self) -> PauseReason:
        return PauseReason.WITHDRAWN if self.is_leaving else self.pause_reason


class SitePresence:
    """Enrolled sites; one daemon a site, the newest fences the older.

    Args:
        ledger: remembers every site that ever enrolled.
        clock: monotonic seconds.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._present: dict[SiteId, _Presence] = {}
        self._known = ledger.sites()
        self._excluded = ledger.excluded()

    def __len__(self) -> int:
        """How many sites are present, or presumed so."""
        return len(self._present)

    def presume(self) -> None:
        """After a restart in the middle of a run: count all known sites as alive until their stall timeout.

        Otherwise the first tick would see nobody alive and close or abandon the round before a daemon can call again.
        Not a site that cannot call, as the operator excluded it or revoked its certificates: it would count for good.
        """
        refused = self._excluded.keys() | self._ledger.revoked().keys()
        for site, roles in self._known.items():
            if site not in refused:
                self._present[site] = _Presence(None, frozenset(map(Role, roles)), None, self._clock())

    def enroll(
        self,
        site: SiteId,
        roles: Iterable[Role],
        instance: str,
        pause_reason: PauseReason = PauseReason.NONE,
        member: Member = NO_MEMBER,
    ) -> None:
        """Register a daemon; an older one of the same site is fenced from now on.

        Args:
            roles: that its certificate has: `access.authorization` has checked that.
            pause_reason: why it takes no task yet; such a site is known, but neither enrolled nor alive for a round.
            member: what it says of itself for secure aggregation.

        Raises:
            ExcludedError: the operator keeps the site out.
        """
        self._check_admitted(site)
        offered = frozenset(roles)
        self._remember(site, sorted(offered))
        self._present[site] = _Presence(instance, offered, None, self._clock(), pause_reason, member=member)

    def seen(self, site: SiteId, instance: str, mark: Hashable = None) -> None:
        """Record a daemon's call. May be called from any thread.

        With a mark the daemon counts as alive only while the mark changes or itself reports progress. A daemon whose
        training hangs goes on beating, and no round may wait for it. The same holds for a presumed daemon. In a fit
        from before a restart it sends only heartbeats for hours, and enrolls when it asks for something.

        Raises:
            ExcludedError: the operator keeps the site out.
            NotEnrolledError: this server process has not seen it enroll.
            FencedError: a newer daemon of the site has enrolled.
        """
        self._check_admitted(site)
        presence = self._present.get(site)
        if presence is None or presence.instance is None:
            if presence is not None and isinstance(mark, Progress):
                self._heard(presence, mark)
            raise NotEnrolledError(f"site {site} is not enrolled here; enroll (again)")
        if presence.instance != instance:
            raise FencedError(f"a newer daemon of site {site} has enrolled; this one has to end")
        self._heard(presence, mark)

    def asks(self, site: SiteId, instance: str) -> None:
        """Record that a daemon asks for a task: whatever it said before, it takes tasks. May be called from any thread.

        Raises:
            ExcludedError, NotEnrolledError, FencedError: as of `seen`.
        """
        self.seen(site, instance)
        if (presence := self._present.get(site)) is not None:
            presence.is_leaving, presence.work = False, None

    def leaves(self, site: SiteId) -> None:
        """Record that a site has left the run, as its daemon said in the middle of a task.

        It says so by enrolling, too, but only when its fit has ended: a round that opens in between would invite it.
        """
        if (presence := self._present.get(site)) is not None:
            presence.is_leaving = True

    def note(self, site: SiteId, progress: Progress) -> None:
        """Keep a daemon's latest report for screens and metrics, from any thread; it is no sign of progress."""
        if (presence := self._present.get(site)) is not None:
            presence.latest = progress

    def progress(self, site: SiteId) -> Progress | None:
        """The daemon's latest report; None: none since it enrolled. May be called from any thread."""
        presence = self._present.get(site)
        return None if presence is None else presence.latest

    def telemetry(self, site: SiteId) -> Mapping[str, float]:
        """Numbers of the site's machine by `common.protocol.telemetry`'s names, as far as its policy lets them out."""
        return {} if (latest := self.progress(site)) is None else latest.telemetry

    def exclude(self, site: SiteId, reason: str) -> None:
        """Refuse a site from now on; one that is registered need not have enrolled before."""
        self._remember(site, self._known.get(site, []))
        self._ledger.exclude(site, reason)
        self._excluded[site] = reason
        self._present.pop(site, None)

    def forget(self, site: SiteId) -> None:
        """Drop a site's daemon until it enrolls again: its certificate was revoked."""
        self._present.pop(site, None)

    def erase(self, site: SiteId) -> None:
        """Forget that a site ever enrolled, or was excluded."""
        self._ledger.forget_site(site)
        for remembered in (self._known, self._excluded, self._present):
            remembered.pop(site, None)

    def known(self) -> dict[SiteId, list[str]]:
        """Roles of all sites that ever enrolled or were excluded. May be called from any thread."""
        return dict(self._known)

    def admit(self, site: SiteId) -> None:
        """Allow an excluded site to enroll again."""
        self._ledger.exclude(site, None)
        self._excluded.pop(site, None)

    def exclusion(self, site: SiteId) -> str | None:
        """The operator's reason for excluding a site; None: it is not excluded. May be called from any thread."""
        return self._excluded.get(site)

    def roles(self, site: SiteId) -> frozenset[Role]:
        """The roles in which a present site enrolled; empty: it is not present. May be called from any thread.

        The registration grants each of them (`access.authorization` refuses others); in plain text they are claimed.
        """
        presence = self._present.get(site)
        return frozenset() if presence is None else presence.roles

    def look(self, site: SiteId) -> tuple[float, str] | None:
        """Seconds since the daemon's last progress, and its activity in words; None: at most it is presumed."""
        presence = self._present.get(site)
        if presence is None or (presence.instance is None and presence.latest is None):
            return None
        return self._clock() - presence.moved_at, presence.reason.value or _activity(presence.work)

    def ages(self) -> dict[SiteId, float]:
        """Seconds since the last progress, by site that is present or presumed so. May be called from any thread."""
        # list(): the coordinator's thread may change the dictionary while a scrape walks it.
        return {site: self._clock() - presence.moved_at for site, presence in list(self._present.items())}

    def pause_reason(self, site: SiteId) -> PauseReason:
        """Why a present site takes no task now."""
        presence = self._present.get(site)
        return PauseReason.NONE if presence is None else presence.reason

    def hold(self, site: SiteId, reason: PauseReason) -> None:
        """Count a present site as one that takes no task, until it enrolls again; what it said itself comes first."""
        if (presence := self._present.get(site)) is not None and presence.pause_reason is PauseReason.NONE:
            presence.pause_reason = reason

    def member(self, site: SiteId) -> Member:
        """What a present site said of itself for secure aggregation. May be called from any thread."""
        presence = self._present.get(site)
        return NO_MEMBER if presence is None else presence.member

    def last_seen(self, site: SiteId) -> str:
        """What is known, in words, of a site that has not reported; goes into the ledger and onto screens."""
        if site in self._excluded:
            return f"{EXCLUDED}{self._excluded[site]}"
        if (latest := self.look(site)) is None:
            return "not heard of since the server started"
        age_s, activity = latest
        return f"{activity}, last progress {age_s:.0f} s ago"

    def enrolled(self, role: Role) -> frozenset[SiteId]:
        """Sites of a role that are present and take tasks."""
        return frozenset(
            site
            for site, presence in list(self._present.items())
            if presence.reason is PauseReason.NONE and role in presence.roles
        )

    def alive(self, role: Role, stall_timeout_s: float) -> frozenset[SiteId]:
        """Enrolled sites that made progress within the last `stall_timeout_s` seconds."""
        since = self._clock() - stall_timeout_s
        return frozenset(
            site
            for site in self.enrolled(role)
            if (presence := self._present.get(site)) is not None and presence.moved_at >= since
        )

    def _heard(self, presence: _Presence, mark: Hashable) -> None:
        if isinstance(mark, Progress):
            presence.latest = presence.work = mark
        if mark is None or mark != presence.mark or (isinstance(mark, Progress) and mark.making_progress):
            presence.mark, presence.moved_at = mark, self._clock()

    def _remember(self, site: SiteId, roles: list[str]) -> None:
        """Record a site's roles, if they changed: daemons that wait for a run enroll every few seconds."""
        if self._known.get(site) != roles:
            self._ledger.enroll(site, roles)
            self._known[site] = roles

    def _check_admitted(self, site: SiteId) -> None:
        if (reason := self._excluded.get(site)) is not None:
            raise ExcludedError(f"the operator has excluded site {site}: {reason}")


def _activity(work: Progress | None) -> str:
    """A daemon's reported progress in words."""
    if work is None:
        return "idle"
    if not work.epochs:
        return work.activity.value
    return f"{work.activity.value}, epoch {work.epoch}/{work.epochs}"


def possible_trainers(presence: SitePresence, certificates: Certificates) -> frozenset[SiteId]:
    """Sites that may train: registered ones with that role, or in plain text those that ever enrolled in it.

    Excluded sites are none. May be called from any thread.
    """
    rows = certificates.all()
    if rows:  # a server with TLS: its operator at least is registered
        valid = (row for row in rows if row.party == Party.SITE and certificates.status(row) == "valid")
        sites = {SiteId(row.name) for row in valid if Role.TRAINER in row.roles}
    else:
        sites = {site for site, roles in presence.known().items() if Role.TRAINER in roles}
    return frozenset(site for site in sites if presence.exclusion(site) is None)


def absences(presence: SitePresence, certificates: Certificates, stall_timeout_s: float) -> dict[SiteId, str]:
    """Why each site that is known and not alive as a trainer is not. May be called from any thread."""
    rows = [row for row in certificates.all() if row.party == Party.SITE]
    status = {SiteId(row.name): certificates.status(row) for row in sorted(rows, key=lambda row: row.added_at)}
    status |= {SiteId(row.name): "valid" for row in rows if certificates.status(row) == "valid"}
    granted = {SiteId(row.name): row.roles for row in rows}
    known = presence.known()
    alive = presence.alive(Role.TRAINER, stall_timeout_s)
    reasons: dict[SiteId, str] = {}
    for site in {*known, *status} - alive:
        roles = {*known.get(site, ()), *granted.get(site, ())}
        trains = not roles or Role.TRAINER in roles  # one that was excluded before it enrolled has none
        reasons[site] = _why(presence, site, status.get(site, ""), trains=trains, enrolled=site in known)
    return reasons


def _why(presence: SitePresence, site: SiteId, certificate: str, *, trains: bool, enrolled: bool) -> str:
    if not trains:
        return NO_TRAINER
    if certificate not in ("", "valid"):
        return f"certificate {certificate}"
    if presence.exclusion(site) is not None:
        return "excluded"
    if presence.look(site) is None:
        return "away" if enrolled else "never enrolled"
    if (reason := presence.pause_reason(site)) is not PauseReason.NONE:
        return reason.value
    return "silent" if Role.TRAINER in presence.roles(site) else NO_TRAINER


class Invitations:
    """A run's open invitations: which site has which task, until it answers or the round closes; one for a site.

    Args:
        notify: wakes the long polls of the given sites.
    """

    def __init__(
        self, run: str, ledger: Ledger, presence: SitePresence, notify: Callable[[Sequence[SiteId]], None]
    ) -> None:
        self._run, self._ledger, self._presence, self._notify = run, ledger, presence, notify
        self._open: dict[SiteId, TaskRow] = {}
        self._silent: dict[SiteId, str] = {}  # of those sent last: who did not answer before they were closed

    def of(self, site: SiteId) -> TaskRow | None:
        """The site's open invitation."""
        return self._open.get(site)

    def may_fetch(self, site: SiteId, address: Digest) -> bool:
        """Whether the site's own open task names this blob. May be called from any thread."""
        row = self._open.get(site)
        return row is not None and row.base_digest == address

    def open_rows(self) -> list[TaskRow]:
        """All open invitations, in site order."""
        return [self._open[site] for site in sorted(self._open)]

    def has(self, row: TaskRow) -> bool:
        """Whether this very invitation is still open."""
        current = self._open.get(row.site)
        return current is not None and current.task_id == row.task_id

    def take_up(self, tasks: Iterable[TaskRow]) -> None:
        """After a restart: restore those that the ledger has as open."""
        self._open = {task.site: task for task in tasks if task.is_open}

    def started(self, row: TaskRow) -> None:
        """Record, once, that a site works on its task."""
        if row.task_status == "invited":
            self._open[row.site] = replace(row, task_status="started")
            self._ledger.set_task_status(row.task_id, "started")

    def answered(self, row: TaskRow) -> None:
        """Close an invitation; the ledger has its outcome already."""
        del self._open[row.site]

    def clear(self) -> dict[SiteId, str]:
        """Close all; by site that has not answered, what is known about the site in words.

        Called again before others are sent, it says the same: a full disk may have kept the first answer from the
        ledger.
        """
        self._silent |= {site: self._presence.last_seen(site) for site in self._open}
        self._open.clear()
        return dict(self._silent)

    def send(
        self,
        kind: TaskKind,
        round: int,
        attempt: int,
        sites: Sequence[SiteId],
        bases: Mapping[SiteId, tuple[Digest, int]],
        write: Callable[[Sequence[TaskRow]], None],
        sum_of: SumOf | None = None,
    ) -> None:
        """Record the tasks (by `write`), wake the sites: in this order, and the bases' blobs are stored before.

        Args:
            bases: what each site is to fetch, digest and bytes; nothing for a site that is not in it.

        A crash in between leaves blobs that no task names (swept at the next start), or tasks that sites find when they
        ask. It never leaves a task whose model is missing.
        """
        reach("broadcast-stored")
        rows = []
        for site in sites:
            base, nbytes = bases.get(site, (None, 0))
            # 128 random bits: a site cannot guess another site's task id, and no restart can repeat one.
            task = TaskRow(secrets.token_hex(16), self._run, round, attempt, site, kind, base, nbytes, sum_of=sum_of)
            rows.append(task)
        write(rows)
        reach("round-opened")
        self._open, self._silent = {row.site: row for row in rows}, {}
        self._notify(sites)
