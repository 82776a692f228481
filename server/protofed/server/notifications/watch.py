"""What people should be told of now: read from the ledger and from memory, as the metrics are, never from a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from protofed.common.clock import stamp
from protofed.common.config.notify import Notify, NotifyEvent
from protofed.common.payload import SiteId
from protofed.common.pki.certificate import Party
from protofed.common.pki.identity import LiveIdentity
from protofed.common.storage.journal import Fact
from protofed.server.access.certificates import Certificates
from protofed.server.notifications.wording import ABANDONED, OVERDUE, Occurrence
from protofed.server.rounds import phases
from protofed.server.rounds.coordinator import Coordinator
from protofed.server.rounds.presence import SitePresence
from protofed.server.rounds.run_queue import RunQueue
from protofed.server.rounds.waiting import BLOCKED, NAMED
from protofed.server.storage.reader import LedgerReader

DAY_S: Final = 86_400.0
ASKING = (
    phases.Collecting,
    phases.Summing,
    phases.Evaluating,
)  # phases that wait for sites' answers, which is no block
OPEN = (phases.Collecting, phases.Summing, phases.Aggregating)  # phases that a round's deadline should end


@dataclass(frozen=True)
class WatchSources:
    """Where the watch reads from.

    Attributes:
        records: a connection of its own: the coordinator's must not be used by another thread.
        identity: the server's; None: plain text.
        since: Unix time since which an event is told of.
        clock: monotonic seconds, the presence's.
        now: Unix time.
    """

    runs: RunQueue
    presence: SitePresence
    records: LedgerReader
    certificates: Certificates
    identity: LiveIdentity | None
    since: Callable[[NotifyEvent], float]
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time


@dataclass(frozen=True)
class News:
    """What to tell, and the keys of what was told and is over."""

    occurrences: list[Occurrence]
    over: list[str]


class Watch:
    """Looks for what the settings ask for; remembers only since when something lasts.

    A thread of its own calls it.
    """

    def __init__(self, settings: Notify, sources: WatchSources) -> None:
        self._settings, self._sources = settings, sources
        self._began = sources.clock()
        self._stuck: tuple[str, float] | None = None  # the key of what does not go on, and since when

    def look(self, told: Collection[str]) -> News:
        """What is there to be told, but for what was `told` (keys).

        Raises:
            StateError: the ledger cannot be read.
        """
        found, over = list[Occurrence](), list[str]()
        current = self._going_on()
        if NotifyEvent.RUN_ENDED in self._settings.events:
            found += self._ended()
        if NotifyEvent.RUN_STALLED in self._settings.events:
            found += self._stalled(current, told, over)
        if NotifyEvent.SITE_SILENT in self._settings.events and current is not None:
            found += self._silent(current.run, told, over)
        if NotifyEvent.CERTIFICATE_ENDS in self._settings.events:
            found += self._ending()
        return News([each for each in found if each.key not in told], over)

    def _going_on(self) -> Coordinator | None:
        """The run that should advance; None: all have ended, or it is paused."""
        current = self._sources.runs.current
        return None if current is None or current.paused else current

    def _ended(self) -> Iterator[Occurrence]:
        since = self._sources.since(NotifyEvent.RUN_ENDED)
        for row in self._sources.records.runs():
            if row.ended_at is not None and row.outcome is not None and row.ended_at >= since:
                # With the time: a run that was rolled back ends again.
                key = f"{NotifyEvent.RUN_ENDED}:{row.run}:{row.ended_at!r}"
                yield Occurrence(key, NotifyEvent.RUN_ENDED, row.run, facts={"outcome": row.outcome.value})

    def _stalled(self, current: Coordinator | None, told: Collection[str], over: list[str]) -> Iterator[Occurrence]:
        if current is None or isinstance(phase := current.phase, phases.FinishedPhase):
            self._stuck = None
            return
        prefix, now = f"{NotifyEvent.RUN_STALLED}:{current.run}:", self._sources.clock()
        key = f"{prefix}{phase.round}"
        over += [other for other in told if other.startswith(prefix) and other != key]
        if (reason := self._reason(current, phase)) is None:
            self._stuck = None
            return
        if self._stuck is None or self._stuck[0] != key:  # in another round it has advanced since
            self._stuck = key, now
        if (lasting_s := now - self._stuck[1]) >= self._settings.stalled_after_s and key not in told:
            facts: dict[str, Fact] = {"reason": reason, "round": phase.round, "for_s": round(lasting_s)}
            # Of a site only its name: why it is missing may be in an operator's own words.
            waiting = current.waiting(self._sources.certificates)
            missing = [] if waiting is None else [site.site for site in waiting.missing]
            facts |= {"missing": list[Fact](missing[:NAMED]), "missing_sites": len(missing)}
            yield Occurrence(key, NotifyEvent.RUN_STALLED, current.run, facts=facts)

    def _reason(self, current: Coordinator, phase: phases.Phase) -> str | None:
        """Why the run does not advance; None: it does, as far as can be seen."""
        if not isinstance(phase, ASKING):
            waiting = current.waiting(self._sources.certificates)
            if waiting is not None and waiting.reason in BLOCKED:
                return waiting.reason.value
        newest = self._sources.records.newest(current.run)
        if newest is None or newest.state is not None:  # it published: the run advances
            return None
        deadline = newest.opened_at + current.recipe.federation.deadline_s
        if newest.closed_at is None and isinstance(phase, OPEN) and self._sources.now() > deadline:
            return OVERDUE
        attempts = self._sources.records.rounds(current.run, since=newest.round)
        return ABANDONED if any(row.abandoned is not None for row in attempts) else None

    def _silent(self, run: str, told: Collection[str], over: list[str]) -> Iterator[Occurrence]:
        presence, after_s = self._sources.presence, self._settings.silent_after_s
        ages, waited_s, revoked = presence.ages(), self._sources.clock() - self._began, self._revoked()
        for site in presence.known():
            key = f"{NotifyEvent.SITE_SILENT}:{site}"
            age_s = ages.get(site, waited_s)  # one that never called since the start counts from there
            if presence.exclusion(site) is not None or site in revoked:
                over += [key] if key in told else []
            elif age_s >= after_s:
                facts: dict[str, Fact] = {"for_s": round(age_s)}
                yield Occurrence(key, NotifyEvent.SITE_SILENT, run, site, facts)
            elif key in told and presence.look(site) is not None:  # and not only presumed to be there, after a restart
                over.append(key)

    def _revoked(self) -> frozenset[SiteId]:
        """Sites all of whose certificates were revoked: they cannot call."""
        rows = [row for row in self._sources.certificates.all() if row.party == Party.SITE]
        able = {row.name for row in rows if row.revoked_at is None}
        return frozenset(SiteId(row.name) for row in rows if row.name not in able)

    def _last_ends(self) -> dict[tuple[str, str], float]:
        """When the last valid certificate of each party and name ends, in Unix time."""
        certificates, ends = self._sources.certificates, dict[tuple[str, str], float]()
        for row in certificates.all():
            if certificates.status(row) == "valid":
                ends[row.party, row.name] = max(row.not_after, ends.get((row.party, row.name), row.not_after))
        return ends

    def _ending(self) -> Iterator[Occurrence]:
        days = self._settings.certificate_days
        ends = self._last_ends()
        if self._sources.identity is not None:
            own = self._sources.identity.current().certificate
            ends["server", own.name] = own.not_after.timestamp()
        for (party, name), until in ends.items():
            left = (until - self._sources.now()) / DAY_S
            if near := [each for each in days if left <= each]:
                # With its end: a renewed certificate ends at another time.
                key = f"{NotifyEvent.CERTIFICATE_ENDS}:{party}:{name}:{until:.0f}:{min(near)}"
                facts: dict[str, Fact] = {"party": party, "name": name, "days_left": int(left // 1)}
                facts["until"] = stamp(datetime.fromtimestamp(until, UTC))
                site = name if party == Party.SITE else None
                yield Occurrence(key, NotifyEvent.CERTIFICATE_ENDS, site=site, facts=facts)
