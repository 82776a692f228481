"""What the server tells Prometheus of how things are, read when somebody asks: from memory, and from a connection to
the ledger of its own. Nothing here waits for the coordinator's thread, nor does that wait for anything here.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import structlog
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from protofed.common.config.recipe import Federation, Recipe
from protofed.common.monitoring.metric import Metric
from protofed.common.pki.identity import LiveIdentity
from protofed.common.protocol.messages import PROTOCOL_VERSION, Activity, TaskKind
from protofed.common.version import VERSION
from protofed.server import metrics as meters
from protofed.server.access.certificates import Certificates
from protofed.server.operator.overview import spreads
from protofed.server.rounds import phases
from protofed.server.rounds import state_statistics as figures
from protofed.server.rounds.presence import SitePresence
from protofed.server.rounds.resume import recipe_of
from protofed.server.rounds.run_queue import RunQueue
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow, RunRow

log = structlog.get_logger()
Families: TypeAlias = Iterable[Family]
STANDINGS = ("queued", "running", "paused", *(outcome.value for outcome in phases.RoundOutcome))
SCORES = (  # sites name scores as they like: no other name becomes a label
    *("accuracy", "balanced_accuracy", "auroc", "ece", "many", "medium", "few", "groups", "pm_v", "pm_l"),
)
SCOPES = ("global", "personal")
LOCAL = "local."  # on the site's own test set
STALL_TIMEOUT_S = float(
    Federation.model_fields["stall_timeout_s"].default
)  # where no run says when a site counts as lost


@dataclass(frozen=True)
class Watched:
    """What is looked at.

    Attributes:
        records: a connection that nobody else uses.
        lag: of the event loop, in seconds; None: it does not run yet.
    """

    runs: RunQueue
    roster: SitePresence
    records: LedgerReader
    certificates: Certificates
    identity: LiveIdentity | None
    state: Path
    lag: Callable[[], float | None]


class StateCollector(Collector):
    """One scrape after the other; what cannot be read is left out of a scrape, and logged when that begins."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._left_out: set[str] = set()

    def collect(self) -> Families:
        """All that can be read now."""
        for part in (_process, _run_now, _ledger, _sites, _registered, _telemetry, _certificates, _disk):
            yield from self._read(part)

    def _read(self, part: Callable[[Watched], Families]) -> Families:
        name = part.__name__.strip("_")
        try:
            found = list(part(self._watched))
        except Exception as error:  # whatever it is: the rest can be told
            if name not in self._left_out:
                self._left_out.add(name)
                log.warning("metrics are left out: they cannot be read", of=name, why=f"{error}")
            return []
        self._left_out.discard(name)
        return found


def _process(watched: Watched) -> Families:
    yield meters.BUILD.family({(VERSION, str(PROTOCOL_VERSION)): 1})
    if (lag := watched.lag()) is not None:
        yield meters.LAG.family({(): lag})


def _run_now(watched: Watched) -> Families:
    """Of the run that goes on, as memory has it: it can be told even if the ledger cannot be read."""
    if (current := watched.runs.current) is not None:
        phase = current.phase
        yield _one_hot(meters.PHASE, current.run, phases.name(phase), phases.PHASES)
        yield from _recipe(current.recipe)
        if not isinstance(phase, phases.FinishedPhase):
            yield meters.ROUND.family({(current.run,): phase.round})


def _recipe(recipe: Recipe) -> Families:
    yield meters.PLANNED.family({(recipe.name,): recipe.rounds})
    yield meters.DEADLINE.family({(recipe.name,): recipe.federation.deadline_s})


def _ledger(watched: Watched) -> Families:
    """The queue; of the run that goes on, or of the last one that ended, its newest round, state and scores."""
    current, rows = watched.runs.current, watched.records.runs()
    standings = [_standing(row, None if current is None else current.run) for row in rows]
    yield meters.RUNS.family({(standing,): standings.count(standing) for standing in STANDINGS})
    shown = [row for row in rows if current is not None and row.run == current.run]
    ended = sorted((row for row in rows if row.ended_at is not None), key=lambda row: row.ended_at or 0)
    if not (shown := shown or ended[-1:]):
        return
    (row,) = shown
    newest = watched.records.newest(row.run)
    if row.ended_at is not None:
        yield _one_hot(meters.PHASE, row.run, "finished", phases.PHASES)
        yield meters.ROUND.family({(row.run,): newest.round if newest else 0})
        yield from _recipe(recipe_of(row))
    if newest is not None:
        yield from _round(watched.records, row, newest)
    yield from _state(watched.records, row.run)


def _standing(row: RunRow, current: str | None) -> str:
    """One of `STANDINGS`."""
    return row.outcome or ("paused" if row.paused else "running" if row.run == current else "queued")


def _round(records: LedgerReader, run: RunRow, newest: RoundRow) -> Families:
    is_open = newest.closed_at is None and run.ended_at is None
    yield meters.OPEN.family({(run.run,): max(0.0, time.time() - newest.opened_at) if is_open else 0})
    yield meters.QUORUM.family({(run.run,): newest.quorum})
    tasks = records.tasks(run.run, newest.round, newest.attempt)
    fates = [task.fate for task in tasks if task.kind is not TaskKind.SCORE]
    states = {
        "invited": len(fates),
        "started": fates.count("started"),
        "reported": sum(fate in ("reported", "set-aside") for fate in fates),
        "late": fates.count("late"),
        "failed": fates.count("failed"),
    }
    yield meters.SITES_OF_ROUND.family({(state,): count for state, count in states.items()})


def _state(records: LedgerReader, run: str) -> Families:
    """Of the newest state and of the newest one that was scored."""
    if (published := records.newest(run, published=True)) is not None:
        yield meters.CHECKPOINT.family({(): max(0.0, time.time() - (published.closed_at or 0))})
        prototypes = (
            (figures.COVERED, meters.COVERED),
            (figures.SHIFT, meters.SHIFT),
            (figures.MIN_DISTANCE, meters.MIN_DISTANCE),
        )
        for name, metric in prototypes:
            if name in published.figures:
                yield metric.family({(): published.figures[name]})
    if (scored := records.newest(run, scored=True)) is not None:
        by_site = records.scores(run, scored.round).get(scored.round, {})
        wanted = {site: {n: v for n, v in scores.items() if _labels(n)} for site, scores in by_site.items()}
        values = {}
        for name, found in spreads(wanted).items():
            for stat in ("mean", "std", "worst"):
                values[(*_labels(name), stat)] = float(getattr(found, stat))
        yield meters.EVAL.family(values)


def _labels(score: str) -> tuple[str, ...]:
    """Scope and metric of a score; empty of one that is not told, as recalls by class and names that nobody knows."""
    scope, _, metric = score.partition(".")
    return (scope, metric) if scope in SCOPES and metric.removeprefix(LOCAL) in SCORES else ()


def _sites(watched: Watched) -> Families:
    roster, current = watched.roster, watched.runs.current
    stall_timeout_s = STALL_TIMEOUT_S if current is None else current.recipe.federation.stall_timeout_s
    ages = roster.ages()
    told = {site: progress for site in ages if (progress := roster.progress(site)) is not None}
    there = {site for site in ages if roster.look(site) is not None}
    takes_tasks = {site for site in ages if not roster.hold(site)}
    alive = {site for site in takes_tasks if ages[site] <= stall_timeout_s}
    training = {site for site in alive if site in told and told[site].activity is Activity.TRAINING}
    states = {"enrolled": takes_tasks, "alive": alive, "training": training}
    yield meters.SITES.family({(state,): len(sites) for state, sites in states.items()})
    yield meters.LAST_SEEN.family({(site,): age for site, age in ages.items()})
    yield meters.PROGRESS.family({(site,): progress.share or 0.0 for site, progress in told.items()})
    yield meters.SITE_EPOCH.family({(site,): progress.epoch for site, progress in told.items()})
    doing = {site: told[site].activity if site in told else Activity.IDLE for site in there}
    values: dict[tuple[str, ...], float] = {
        (site, one.value): float(one is activity) for site, activity in doing.items() for one in Activity
    }
    yield meters.SITE_PHASE.family(values)


def _registered(watched: Watched) -> Families:
    """Of all sites that ever came."""
    there = {site: watched.roster.look(site) is not None for site in watched.records.sites()}
    yield meters.SITE_REGISTERED.family({(site,): float(here) for site, here in there.items()})


def _telemetry(watched: Watched) -> Families:
    """What sites tell of their machines, as far as their policies let it pass."""
    told = {site: watched.roster.telemetry(site) for site in watched.roster.ages()}
    for name, metric in meters.TELEMETRY.items():
        yield metric.family({(site,): numbers[name] for site, numbers in told.items() if name in numbers})


def _certificates(watched: Watched) -> Families:
    """Until the last one of each name ends; what was revoked ends for nobody."""
    now, ends = time.time(), dict[tuple[str, ...], float]()
    if watched.identity is not None:
        own = watched.identity.now().certificate
        ends["server", own.name] = own.not_after.timestamp()
    for row in watched.certificates.all():
        if row.revoked_at is None:
            key = (row.party, row.name)
            ends[key] = max(row.not_after, ends.get(key, row.not_after))
    yield meters.CERTIFICATES.family({key: until - now for key, until in ends.items()})


def _disk(watched: Watched) -> Families:
    yield meters.FREE.family({(): shutil.disk_usage(watched.state).free})


def _one_hot(metric: Metric, of: str, now: str, all_of_them: Iterable[str]) -> Family:
    return metric.family({(of, one): float(one == now) for one in all_of_them})
