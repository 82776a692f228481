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
from protofed.common.payload import SiteId
from protofed.common.pki.identity import LiveIdentity
from protofed.common.protocol.messages import PROTOCOL_VERSION, Activity, TaskKind
from protofed.common.statistics import spreads
from protofed.common.version import VERSION
from protofed.server import metrics
from protofed.server.access.certificates import Certificates
from protofed.server.rounds import phases, state_statistics
from protofed.server.rounds.presence import SitePresence
from protofed.server.rounds.resume import recipe_of
from protofed.server.rounds.run_queue import RunQueue
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow, RunRow
from protofed.server.verdicts import RoundOutcome

log = structlog.get_logger()
Families: TypeAlias = Iterable[Family]
STATUSES = ("queued", "running", "paused", *(outcome.value for outcome in RoundOutcome))
TASK_STATUSES = ("invited", "started", "reported", "set-aside", "failed", "late", "not-needed")  # of `TaskRow`
SITE_STATES = ("excluded", "away", "held", "silent", "working", "idle")
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
    presence: SitePresence
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
        for part in (_process, _run_now, _ledger, _sites, _known_sites, _telemetry, _certificates, _disk):
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
    yield metrics.BUILD.family({(VERSION, str(PROTOCOL_VERSION)): 1})
    if (lag := watched.lag()) is not None:
        yield metrics.EVENT_LOOP_LAG.family({(): lag})


def _run_now(watched: Watched) -> Families:
    """Of the run that goes on, as memory has it: it can be told even if the ledger cannot be read."""
    if (current := watched.runs.current) is not None:
        phase = current.phase
        yield _one_hot(metrics.PHASE, current.run, phases.name(phase), phases.PHASES)
        yield from _recipe(current.recipe)
        if not isinstance(phase, phases.FinishedPhase):
            yield metrics.ROUND.family({(current.run,): phase.round})


def _recipe(recipe: Recipe) -> Families:
    yield metrics.PLANNED.family({(recipe.name,): recipe.rounds})
    yield metrics.DEADLINE.family({(recipe.name,): recipe.federation.deadline_s})


def _ledger(watched: Watched) -> Families:
    """The queue; of the run that goes on, or of the last one that ended, its newest round, state and scores."""
    current, rows = watched.runs.current, watched.records.runs()
    statuses = [_status(row, None if current is None else current.run) for row in rows]
    yield metrics.RUNS.family({(status,): statuses.count(status) for status in STATUSES})
    shown = [row for row in rows if current is not None and row.run == current.run]
    ended = sorted((row for row in rows if row.ended_at is not None), key=lambda row: row.ended_at or 0)
    if not (shown := shown or ended[-1:]):
        return
    (row,) = shown
    newest = watched.records.newest(row.run)
    if row.ended_at is not None:
        yield _one_hot(metrics.PHASE, row.run, "finished", phases.PHASES)
        yield metrics.ROUND.family({(row.run,): newest.round if newest else 0})
        yield from _recipe(recipe_of(row))
    if newest is not None:
        yield from _round(watched.records, row, newest)
    yield from _state(watched.records, row.run)


def _status(row: RunRow, current: str | None) -> str:
    """One of `STATUSES`."""
    return row.outcome or ("paused" if row.paused else "running" if row.run == current else "queued")


def _round(records: LedgerReader, run: RunRow, newest: RoundRow) -> Families:
    if newest.closed_at is None and run.ended_at is None:
        yield metrics.OPENED.family({(run.run,): newest.opened_at})
    yield metrics.QUORUM.family({(run.run,): newest.quorum})
    tasks = records.tasks(run.run, newest.round, newest.attempt)
    statuses = [task.task_status for task in tasks if task.kind is not TaskKind.SCORE]
    yield metrics.ROUND_SITES.family(
        {(task_status,): statuses.count(task_status) for task_status in (*TASK_STATUSES, *statuses)}
    )


def _state(records: LedgerReader, run: str) -> Families:
    """Of the newest state and of the newest one that was scored."""
    if (published := records.newest(run, published=True)) is not None:
        if published.closed_at is not None:
            yield metrics.CHECKPOINT.family({(): published.closed_at})
        prototypes = (
            (state_statistics.COVERED, metrics.COVERED),
            (state_statistics.SHIFT, metrics.SHIFT),
            (state_statistics.MIN_DISTANCE, metrics.MIN_DISTANCE),
        )
        for name, metric in prototypes:
            if name in published.statistics:
                yield metric.family({(): published.statistics[name]})
    if (scored := records.newest(run, scored=True)) is not None:
        by_site = records.scores(run, scored.round).get(scored.round, {})
        wanted = {site: {n: v for n, v in scores.items() if _labels(n)} for site, scores in by_site.items()}
        values = {}
        for name, found in spreads(wanted).items():
            for stat in ("mean", "std", "worst"):
                values[(*_labels(name), stat)] = float(getattr(found, stat))
        yield metrics.SCORE.family(values)


def _labels(score: str) -> tuple[str, ...]:
    """Scope and metric of a score; empty of one that is not told, as recalls by class and names that nobody knows."""
    scope, _, metric = score.partition(".")
    return (scope, metric) if scope in SCOPES and metric.removeprefix(LOCAL) in SCORES else ()


def _sites(watched: Watched) -> Families:
    presence = watched.presence
    ages, now = presence.ages(), time.time()
    told = {site: progress for site in ages if (progress := presence.progress(site)) is not None}
    there = {site for site in ages if presence.look(site) is not None}
    yield metrics.LAST_PROGRESS.family({(site,): now - age for site, age in ages.items()})
    yield metrics.PROGRESS.family({(site,): progress.share or 0.0 for site, progress in told.items()})
    yield metrics.SITE_EPOCH.family({(site,): progress.epoch for site, progress in told.items()})
    doing = {site: told[site].activity if site in told else Activity.IDLE for site in there}
    values: dict[tuple[str, ...], float] = {
        (site, one.value): float(one is activity) for site, activity in doing.items() for one in Activity
    }
    yield metrics.SITE_PHASE.family(values)


def _known_sites(watched: Watched) -> Families:
    """Of all sites that ever came, or that the operator excluded before they did."""
    presence, current = watched.presence, watched.runs.current
    stall_timeout_s = STALL_TIMEOUT_S if current is None else current.recipe.federation.stall_timeout_s
    known = watched.records.sites()
    states = [_site_state(presence, site, stall_timeout_s) for site in known]
    yield metrics.SITES.family({(state,): states.count(state) for state in SITE_STATES})
    yield metrics.SITE_REGISTERED.family({(site,): float(presence.look(site) is not None) for site in known})


def _site_state(presence: SitePresence, site: SiteId, stall_timeout_s: float) -> str:
    """One of `SITE_STATES`."""
    if presence.exclusion(site) is not None:
        return "excluded"
    if (found := presence.look(site)) is None:
        return "away"
    if presence.pause_reason(site):
        return "held"
    if found[0] > stall_timeout_s:
        return "silent"
    told = presence.progress(site)
    return "idle" if told is None or told.activity in (Activity.IDLE, Activity.FAILED) else "working"


def _telemetry(watched: Watched) -> Families:
    """What sites tell of their machines, as far as their policies let it pass."""
    told = {site: watched.presence.telemetry(site) for site in watched.presence.ages()}
    for name, metric in metrics.TELEMETRY.items():
        yield metric.family({(site,): numbers[name] for site, numbers in told.items() if name in numbers})


def _certificates(watched: Watched) -> Families:
    """When the last one of each name ends; what was revoked ends for nobody."""
    ends = dict[tuple[str, ...], float]()
    if watched.identity is not None:
        own = watched.identity.now().certificate
        ends["server", own.name] = own.not_after.timestamp()
    for row in watched.certificates.all():
        if row.revoked_at is None:
            key = (row.party, row.name)
            ends[key] = max(row.not_after, ends.get(key, row.not_after))
    yield metrics.CERT_EXPIRY.family(ends)


def _disk(watched: Watched) -> Families:
    yield metrics.STATE_DISK_FREE.family({(): shutil.disk_usage(watched.state).free})


def _one_hot(metric: Metric, of: str, now: str, all_of_them: Iterable[str]) -> Family:
    return metric.family({(of, one): float(one == now) for one in all_of_them})
