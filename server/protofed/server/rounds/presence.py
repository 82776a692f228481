"""Who is there: the daemons that talk to the server now, and when they last got on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from protofed.common.errors import ExcludedError, FencedError, NotEnrolledError
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import PauseReason, Progress, Role
from protofed.server.storage.ledger import Ledger


@dataclass
class _Presence:
    instance: str | None  # None: presumed there, from before a restart
    roles: frozenset[Role]
    mark: Hashable
    moved_at: float
    hold: PauseReason = PauseReason.NONE
    told: Progress | None = None


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

    def presume(self) -> None:
        """After a restart in the middle of a run: all known sites count as alive until they were idle too long."""
        for site, roles in self._known.items():
            if site not in self._excluded:
                self._present[site] = _Presence(None, frozenset(map(Role, roles)), None, self._clock())

    def enroll(self, site: SiteId, roles: Iterable[Role], instance: str, hold: PauseReason = PauseReason.NONE) -> None:
        """Enter a daemon; an older one of the same site is fenced from now on.

        Args:
            hold: why it takes no task yet; such a site is known, but neither enrolled nor alive for a round.

        Raises:
            Excluded: the operator keeps the site out.
        """
        self._check_admitted(site)
        offered = frozenset(roles)
        self._remember(site, sorted(offered))
        self._present[site] = _Presence(instance, offered, None, self._clock(), hold)

    def seen(self, site: SiteId, instance: str, mark: Hashable = None) -> None:
        """A daemon spoke. With a mark it is alive only as long as the mark changes, or says itself that training is
        moving: progress, not noise.

        Raises:
            Excluded: the operator keeps the site out.
            NotEnrolled: this server has not met it yet.
            Fenced: a newer daemon of the site has.
        """
        self._check_admitted(site)
        presence = self._present.get(site)
        if presence is None or presence.instance is None:
            raise NotEnrolledError(f"site {site} is not enrolled here; enroll (again)")
        if presence.instance != instance:
            raise FencedError(f"a newer daemon of site {site} has enrolled; this one has to end")
        if isinstance(mark, Progress):
            presence.told = mark
        if mark is None or mark != presence.mark or (isinstance(mark, Progress) and mark.making_progress):
            presence.mark, presence.moved_at = mark, self._clock()

    def note(self, site: SiteId, progress: Progress) -> None:
        """What a daemon that was `seen` told last: to be looked at, and no sign of progress."""
        if (presence := self._present.get(site)) is not None:
            presence.told = progress

    def progress(self, site: SiteId) -> Progress | None:
        """What the site's daemon told last; None: nothing since it enrolled. Asked from any thread."""
        presence = self._present.get(site)
        return None if presence is None else presence.told

    def telemetry(self, site: SiteId) -> Mapping[str, float]:
        """Numbers of the site's machine, by `common.telemetry`'s names, as far as its policy lets them pass."""
        return {} if (told := self.progress(site)) is None else told.telemetry

    def exclude(self, site: SiteId, reason: str) -> None:
        """Keep a site out from now on, whoever it is."""
        self._remember(site, self._known.get(site, []))
        self._ledger.exclude(site, reason)
        self._excluded[site] = reason
        self._present.pop(site, None)

    def forget(self, site: SiteId) -> None:
        """A site's daemon is not there any more, until it enrolls again."""
        self._present.pop(site, None)

    def admit(self, site: SiteId) -> None:
        """Let an excluded site in again."""
        self._ledger.exclude(site, None)
        self._excluded.pop(site, None)

    def exclusion(self, site: SiteId) -> str | None:
        """Why the operator keeps a site out; None: it may take part."""
        return self._excluded.get(site)

    def look(self, site: SiteId) -> tuple[float, str] | None:
        """Seconds since a daemon's last progress and what it does; None: no daemon of the site has enrolled."""
        presence = self._present.get(site)
        if presence is None or presence.instance is None:
            return None
        return self._clock() - presence.moved_at, presence.hold.value or _doing(presence.mark)

    def ages(self) -> dict[SiteId, float]:
        """Seconds since the last progress of all that are there, or presumed to be. Asked from any thread."""
        return {site: self._clock() - found.moved_at for site, found in list(self._present.items())}

    def hold(self, site: SiteId) -> PauseReason:
        """Why a site that is there takes no task."""
        presence = self._present.get(site)
        return PauseReason.NONE if presence is None else presence.hold

    def last_seen(self, site: SiteId) -> str:
        """What is known of a site that has not reported, in words."""
        if site in self._excluded:
            return f"excluded: {self._excluded[site]}"
        if (found := self.look(site)) is None:
            return "not heard of since the server started"
        return f"{found[1]}, last progress {found[0]:.0f} s ago"

    def enrolled(self, role: Role) -> frozenset[SiteId]:
        """All sites of a role that this server has met, and that take tasks."""
        there = ((site, found.roles) for site, found in list(self._present.items()) if found.hold is PauseReason.NONE)
        return frozenset(site for site, roles in there if role in roles)

    def alive(self, role: Role, stall_timeout_s: float) -> frozenset[SiteId]:
        """Those that got on within the last `stall_timeout_s` seconds."""
        since = self._clock() - stall_timeout_s
        return frozenset(site for site in self.enrolled(role) if self._present[site].moved_at >= since)

    def _remember(self, site: SiteId, roles: list[str]) -> None:
        """Written down only when it is new: daemons that wait for a run enroll every few seconds."""
        if self._known.get(site) != roles:
            self._ledger.enroll(site, roles)
            self._known[site] = roles

    def _check_admitted(self, site: SiteId) -> None:
        if (reason := self._excluded.get(site)) is not None:
            raise ExcludedError(f"the operator has excluded site {site}: {reason}")


def _doing(mark: Hashable) -> str:
    """The last progress that a daemon told, in words."""
    if not isinstance(mark, Progress):
        return "idle"
    if not mark.epochs:
        return mark.activity.value
    return f"{mark.activity.value}, epoch {mark.epoch}/{mark.epochs}"
