"""What people should be told of now: read from the ledger and from memory, as the metrics are, never from a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from protofed.common.clock import stamp
from protofed.common.config.settings import Notify, NotifyEvent
from protofed.common.payload import SiteId
from protofed.common.pki.certificate import Party
from protofed.common.pki.identity import LiveIdentity
from protofed.common.storage.journal import Fact
from protofed.server.access.certificates import Certificates
from protofed.server.notifications.outbox import Told
from protofed.server.notifications.wording import ABANDONED, OVERDUE, Occurrence
from protofed.server.rounds.machine import phases
from protofed.server.rounds.machine.waiting import BLOCKED, NAMED
from protofed.server.rounds.presence import SitePresence
from protofed.server.rounds.queue import RunQueue
from protofed.server.rounds.run import Run
from protofed.server.storage.reader import LedgerReader

DAY_S: Final = 86_400.0
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
    """What to tell.

    Attributes:
        over: the keys of what was told and is over, each with what is to be told of that; None: nothing.
    """

    occurrences: list[Occurrence]
    over: dict[str, Occurrence | None]


class Watch:
    """Looks for what the settings ask for; remembers only since when something lasts.

    A thread of its own calls it.
    """

    def __init__(self, settings: Notify, sources: WatchSources) -> None:
        self._settings, self._sources = settings, sources
        self._began = sources.clock()
        self._stuck: tuple[str, float] | None = None  # the key of what does not go on, and since when

    def look(self, earlier: Mapping[str, Told]) -> News:
        """What is there to be told, but for what was `told` (by key).

        Raises:
            StateError: the ledger cannot be read.
        """
        occurrences, over = list[Occurrence](), dict[str, Occurrence | None]()
        current = self._sources.runs.current
        advancing = None if current is None or current.paused else current
        if NotifyEvent.RUN_ENDED in self._settings.events:
            occurrences += self._ended()
        if NotifyEvent.RUN_STALLED in self._settings.events:
            over |= self._stalls_over(current, earlier)
            occurrences += self._stalled(advancing, earlier)
        if NotifyEvent.SITE_SILENT in self._settings.events:
            over |= self._silences_over(current, earlier)
            occurrences += [] if advancing is None else self._silent(advancing.name)
        if NotifyEvent.CERTIFICATE_ENDS in self._settings.events:
            occurrences += self._ending()
        return News([each for each in occurrences if each.key not in earlier], over)

    def _ended(self) -> Iterator[Occurrence]:
        since = self._sources.since(NotifyEvent.RUN_ENDED)
        for row in self._sources.records.runs():
            if row.ended_at is not None and row.outcome is not None and row.ended_at >= since:
                # With the time: a run that was rolled back ends again.
                key = f"{NotifyEvent.RUN_ENDED}:{row.run}:{row.ended_at!r}"
                yield Occurrence(key, NotifyEvent.RUN_ENDED, row.run, facts={"outcome": row.outcome.value})

    def _stalls_over(self, current: Run | None, earlier: Mapping[str, Told]) -> Iterator[tuple[str, Occurrence | None]]:
        prefix = f"{NotifyEvent.RUN_STALLED}:"
        if not (stalls := [key for key in earlier if key.startswith(prefix)]):
            return
        unended = {row.run for row in self._sources.records.runs() if row.outcome is None}
        for key in stalls:
            run, _, number = key.removeprefix(prefix).rpartition(":")
            if run not in unended:  # which is told of as its end
                yield key, None
            elif current is None or run != current.name or isinstance(phase := current.phase, phases.FinishedPhase):
                continue
            elif current.paused or phase.round < int(number):  # an operator stopped it, or rolled it back
                yield key, None
            elif phase.round > int(number):
                end = self._end(NotifyEvent.RUN_GOES_ON, earlier[key], run)
                rounds: dict[str, Fact] = {"round": phase.round, "stalled_round": int(number)}
                yield key, None if end is None else replace(end, facts={**end.facts, **rounds})

    def _end(self, event: NotifyEvent, earlier: Told, run: str, site: str | None = None) -> Occurrence | None:
        """That what was told is over; None: it was noticed before this event was asked for."""
        if earlier.at < self._sources.since(event) - 1.0:  # a message's time is to the second
            return None
        for_s = max(0, round(self._sources.now() - earlier.since))
        return Occurrence(f"{event}:{site or run}", event, run, site, {"for_s": for_s})

    def _stalled(self, current: Run | None, earlier: Collection[str]) -> Iterator[Occurrence]:
        if current is None or isinstance(phase := current.phase, phases.FinishedPhase):
            self._stuck = None
            return
        key, now = f"{NotifyEvent.RUN_STALLED}:{current.name}:{phase.round}", self._sources.clock()
        if (reason := self._reason(current, phase)) is None:
            self._stuck = None
            return
        if self._stuck is None or self._stuck[0] != key:  # in another round it has advanced since
            self._stuck = key, now
        if (lasting_s := now - self._stuck[1]) >= self._settings.stalled_after_s and key not in earlier:
            facts: dict[str, Fact] = {"reason": reason, "round": phase.round, "for_s": round(lasting_s)}
            # Of a site only its name: why it is missing may be in an operator's own words.
            waiting = current.waiting(self._sources.certificates)
            missing = [] if waiting is None else [site.site for site in waiting.missing]
            facts |= {"missing": list[Fact](missing[:NAMED]), "missing_sites": len(missing)}
            yield Occurrence(key, NotifyEvent.RUN_STALLED, current.name, facts=facts)

    def _reason(self, current: Run, phase: phases.Phase) -> str | None:
        """Why the run does not advance; None: it does, as far as can be seen."""
        waiting = current.waiting(self._sources.certificates)
        if waiting is not None and waiting.reason in BLOCKED:  # sites that work on their answers are no block
            return waiting.reason.value
        newest = self._sources.records.newest(current.name)
        if newest is None or newest.state is not None:  # it published: the run advances
            return None
        deadline = current.deadline_began(newest) + current.recipe.federation.deadline_s
        if newest.closed_at is None and isinstance(phase, OPEN) and self._sources.now() > deadline:
            return OVERDUE
        attempts = self._sources.records.rounds(current.name, since=newest.round)
        return ABANDONED if any(row.abandoned is not None for row in attempts) else None

    def _silences_over(
        self, current: Run | None, earlier: Mapping[str, Told]
    ) -> Iterator[tuple[str, Occurrence | None]]:
        prefix = f"{NotifyEvent.SITE_SILENT}:"
        if not (silent := {SiteId(key.removeprefix(prefix)): key for key in earlier if key.startswith(prefix)}):
            return
        awaited = self._awaited()
        for site, key in silent.items():
            last = self._sources.presence.look(site)  # None: at most presumed to be there, after a restart
            if site not in awaited:
                yield key, None
            elif last is not None and last[0] < self._settings.silent_after_s:
                run = None if current is None else current.name
                yield key, None if run is None else self._end(NotifyEvent.SITE_BACK, earlier[key], run, site)

    def _silent(self, run: str) -> Iterator[Occurrence]:
        ages, waited_s = self._sources.presence.ages(), self._sources.clock() - self._began
        for site in self._awaited():
            age_s = ages.get(site, waited_s)  # one that never called since the start counts from there
            if age_s >= self._settings.silent_after_s:
                key, facts = f"{NotifyEvent.SITE_SILENT}:{site}", dict[str, Fact](for_s=round(age_s))
                yield Occurrence(key, NotifyEvent.SITE_SILENT, run, site, facts)

    def _awaited(self) -> list[SiteId]:
        """The known sites that may call: neither excluded, nor with all of their certificates revoked."""
        presence, revoked = self._sources.presence, self._revoked()
        return [site for site in presence.known() if presence.exclusion(site) is None and site not in revoked]

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
            days_left = (until - self._sources.now()) / DAY_S
            if near := [each for each in days if days_left <= each]:
                # With its end: a renewed certificate ends at another time.
                key = f"{NotifyEvent.CERTIFICATE_ENDS}:{party}:{name}:{until:.0f}:{min(near)}"
                facts: dict[str, Fact] = {"party": party, "name": name, "days_left": int(days_left // 1)}
                facts["until"] = stamp(datetime.fromtimestamp(until, UTC))
                site = name if party == Party.SITE else None
                yield Occurrence(key, NotifyEvent.CERTIFICATE_ENDS, site=site, facts=facts)
