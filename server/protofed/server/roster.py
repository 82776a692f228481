"""Who is there: the daemons that talk to the server now, and when they last got on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from protofed.common.errors import Fenced, NotEnrolled
from protofed.common.payload import SiteId
from protofed.common.task import Role
from protofed.server.ledger import Ledger


@dataclass
class _Presence:
    instance: str | None  # None: presumed there, from before a restart
    roles: frozenset[Role]
    mark: Hashable
    moved_at: float


class Roster:
    """Enrolled sites; one daemon a site, the newest fences the older.

    Args:
        ledger: remembers every site that ever enrolled.
        clock: monotonic seconds.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._present: dict[SiteId, _Presence] = {}

    def presume(self) -> None:
        """After a restart in the middle of a run: all known sites count as alive until they were idle too long."""
        for site, roles in self._ledger.sites().items():
            self._present[site] = _Presence(None, frozenset(map(Role, roles)), None, self._clock())

    def enroll(self, site: SiteId, roles: Iterable[Role], instance: str) -> None:
        """Enter a daemon; an older one of the same site is fenced from now on."""
        offered = frozenset(roles)
        self._ledger.enroll(site, sorted(offered))
        self._present[site] = _Presence(instance, offered, None, self._clock())

    def seen(self, site: SiteId, instance: str, mark: Hashable = None) -> None:
        """A daemon spoke. With a mark it is alive only as long as the mark changes: progress, not noise.

        Raises:
            NotEnrolled: this server has not met it yet.
            Fenced: a newer daemon of the site has.
        """
        presence = self._present.get(site)
        if presence is None or presence.instance is None:
            raise NotEnrolled(f"site {site} is not enrolled here; enroll (again)")
        if presence.instance != instance:
            raise Fenced(f"a newer daemon of site {site} has enrolled; this one has to end")
        if mark is None or mark != presence.mark:
            presence.mark, presence.moved_at = mark, self._clock()

    def enrolled(self, role: Role) -> frozenset[SiteId]:
        """All sites of a role that this server has met."""
        return frozenset(site for site, presence in self._present.items() if role in presence.roles)

    def alive(self, role: Role, idle_s: float) -> frozenset[SiteId]:
        """Those that got on within the last `idle_s` seconds."""
        since = self._clock() - idle_s
        return frozenset(site for site in self.enrolled(role) if self._present[site].moved_at >= since)
