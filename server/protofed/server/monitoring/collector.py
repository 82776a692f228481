"""Metrics that are read at each scrape: from memory, and from the ledger over a connection of the collector's own.

A scrape never waits for the coordinator's thread, nor the coordinator for a scrape. So a slow database or a long
aggregation cannot blind the monitoring.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import structlog
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from protofed.common.config.recipe import Recipe
from protofed.common.monitoring import Metric
from protofed.common.payload import SiteId
from protofed.common.pki.identity import LiveIdentity
from protofed.common.protocol.messages import PROTOCOL_VERSION, SUM_STEPS, Activity, Progress, SumOf, TaskKind
from protofed.common.protocol.scores import spreads
from protofed.common.version import VERSION
from protofed.server import metrics
from protofed.server.access.certificates import Certificates
from protofed.server.rounds.aggregation import publisher
from protofed.server.rounds.context import read_recipe
from protofed.server.rounds.machine import phases
from protofed.server.rounds.machine.waiting import Waiting, WaitReason
from protofed.server.rounds.presence import SitePresence
from protofed.server.rounds.queue import RunQueue
from protofed.server.rounds.run import Run
from protofed.server.rounds.scores.model_warnings import ModelWarning, WarningCode
from protofed.server.rounds.scores.scoring import find_warnings
from protofed.server.storage.blobs import BLOBS
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow, RunRow
from protofed.server.verdicts import RoundOutcome

log = structlog.get_logger()
Families: TypeAlias = Iterable[Family]
STATUSES = ("queued", "running", "paused", *(outcome.value for outcome in RoundOutcome))
TASK_STATUSES = ("invited", "started", "reported", "rejected", "failed", "late", "not-needed")  # of `TaskRow`
SITE_STATES = ("excluded", "away", "held", "silent", "working", "idle")
SCORES = (  # the only names that become labels: sites choose names freely, and each new label costs Prometheus memory
    *("accuracy", "balanced_accuracy", "majority", "auroc", "ece", "many", "medium", "few", "groups", "pm_v", "pm_l"),
    *("average_precision", "sensitivity", "brier", "mae", "bias"),
)
SCOPES = ("global", "personal")
# Of more than so many sites, what an idle one does has no series: its eight would be most of a scrape of 6 MB for
# 10,000 sites, and `protofed_sites` counts them.
MANY_SITES = 1000
LOCAL = "local."  # prefix of scores on the site's own test set


@dataclass(frozen=True)
class CollectorSources:
    """Where the collector reads from.

    Attributes:
        records: a connection of its own: the coordinator's must not be used by another thread.
        identity: None: plain text.
        state: the state folder.
        lag: of the event loop, in seconds; None: the loop does not run yet.
    """

    runs: RunQueue
    presence: SitePresence
    records: LedgerReader
    certificates: Certificates
    identity: LiveIdentity | None
    state: Path
    lag: Callable[[], float | None]


class StateCollector(Collector):
    """Collects all state at each scrape; scrapes come one at a time.

    Metrics that cannot be read are left out. This is logged once until they can be read again. A gap in one graph is
    better than a scrape that fails and takes every graph with it.
    """

    def __init__(self, sources: CollectorSources) -> None:
        self._sources = sources
        self._left_out: set[str] = set()
        self._ended: tuple[RunRow, list[ModelWarning]] | None = None

    def collect(self) -> Families:
        """Called by prometheus_client at each scrape, in a thread of the HTTP server."""
        for part in (_process, _run_now, self._ledger, _sites, _known_sites, _telemetry, _certificates, _disk):
            yield from self._read(part)

    def _read(self, part: Callable[[CollectorSources], Families]) -> Families:
        name = part.__name__.strip("_")
        try:
            families = list(part(self._sources))
        except Exception as error:  # any error: the other metrics are still read
            if name not in self._left_out:
                self._left_out.add(name)
                log.warning("metrics are left out: they cannot be read", of=name, why=f"{error}")
            return []
        self._left_out.discard(name)
        return families

    def _ledger(self, sources: CollectorSources) -> Families:
        """The queue, and the newest round, state and scores of the active run or else of the run that ended last."""
        current, rows = sources.runs.current, sources.records.runs()
        name = None if current is None else current.name
        statuses = [_status(row, name) for row in rows]
        yield metrics.RUNS.family({(status,): statuses.count(status) for status in STATUSES})
        candidates = [row for row in rows if row.run == name or row.ended_at is not None]
        if not candidates:
            return
        row = max(candidates, key=lambda row: (row.run == name, row.ended_at or 0))
        newest, active = sources.records.newest(row.run), current if row.run == name else None
        if row.ended_at is not None:
            yield _one_hot(metrics.PHASE, row.run, "finished", phases.PHASES)
            yield _waiting(row.run, None)
            yield metrics.ROUND.family({(row.run,): newest.round if newest else 0})
            yield from _recipe(read_recipe(row))
        if newest is not None:
            yield from _round(sources.records, row, newest, active)
        yield from _state(sources.records, row.run)
        yield from _scores(sources.records, row.run)
        yield _warnings(row.run, self._ended_warnings(row) if active is None else active.warnings)

    def _ended_warnings(self, row: RunRow) -> list[ModelWarning]:
        """Of a run that is over: read once, since it takes all of its rounds."""
        if self._ended is None or self._ended[0] != row:
            self._ended = row, find_warnings(self._sources.records, row.run)
        return self._ended[1]


def _process(sources: CollectorSources) -> Families:
    yield metrics.BUILD.family({(VERSION, str(PROTOCOL_VERSION)): 1})
    if (lag := sources.lag()) is not None:
        yield metrics.EVENT_LOOP_LAG.family({(): lag})


def _run_now(sources: CollectorSources) -> Families:
    """The active run's phase and round, from memory: they are there even if the ledger cannot be read."""
    if (current := sources.runs.current) is not None:
        phase = current.phase
        yield _one_hot(metrics.PHASE, current.name, phases.name(phase), phases.PHASES)
        yield from _recipe(current.recipe)
        yield _waiting(current.name, current.waiting(sources.certificates))
        yield from _sum_step(current.recipe, phase)
        if not isinstance(phase, phases.FinishedPhase):
            yield metrics.ROUND.family({(current.name,): phase.round})


def _sum_step(recipe: Recipe, phase: phases.Phase) -> Families:
    if recipe.federation.secure:
        step = phase.step if isinstance(phase, phases.Summing) else ""
        yield _one_hot(metrics.SUM_STEP, recipe.name, step, SUM_STEPS)


def _waiting(run: str, waiting: Waiting | None) -> Family:
    reason = None if waiting is None else waiting.reason
    return metrics.WAITING.family({(run, each.value): float(each is reason) for each in WaitReason})


def _recipe(recipe: Recipe) -> Families:
    yield metrics.PLANNED.family({(recipe.name,): recipe.rounds})
    yield metrics.DEADLINE.family({(recipe.name,): recipe.federation.deadline_s})


def _status(row: RunRow, current: str | None) -> str:
    """One of `STATUSES`."""
    return row.outcome or ("paused" if row.paused else "running" if row.run == current else "queued")


def _round(records: LedgerReader, run: RunRow, newest: RoundRow, active: Run | None) -> Families:
    if newest.closed_at is None and active is not None:
        yield metrics.OPENED.family({(run.run,): active.deadline_began(newest)})
    yield metrics.QUORUM.family({(run.run,): newest.quorum})
    tasks = records.tasks(run.run, newest.round, newest.attempt)
    statuses = [task.task_status for task in tasks if task.asks_for_update]
    yield metrics.ROUND_SITES.family(
        {(task_status,): statuses.count(task_status) for task_status in (*TASK_STATUSES, *statuses)}
    )


def _state(records: LedgerReader, run: str) -> Families:
    """Age and prototypes of the newest state."""
    if (published := records.newest(run, published=True)) is not None:
        tasks = records.tasks(run, published.round, published.attempt)
        used = TaskKind.AGREE, SumOf.UPDATE  # they are asked who is in the sum: those that are
        if aggregated := sum((task.kind, task.sum_of) == used for task in tasks):
            yield metrics.SUM_SITES.family({(run,): aggregated})
        if published.closed_at is not None:
            yield metrics.CHECKPOINT.family({(): published.closed_at})
        prototypes = (
            (publisher.COVERED, metrics.COVERED),
            (publisher.SHIFT, metrics.SHIFT),
            (publisher.MIN_DISTANCE, metrics.MIN_DISTANCE),
        )
        for name, metric in prototypes:
            if name in published.statistics:
                yield metric.family({(): published.statistics[name]})


def _scores(records: LedgerReader, run: str) -> Families:
    """The newest ones, which may be of an earlier round than the newest state."""
    if (scored := records.newest(run, scored=True)) is not None:
        by_site = records.scores(run, scored.round).get(scored.round, {})
        labelled = {site: {n: v for n, v in scores.items() if _labels(n)} for site, scores in by_site.items()}
        sums = records.score_sums(run, scored.round).get(scored.round, {})
        values = {}
        for name, spread in spreads(labelled, {n: of_all for n, of_all in sums.items() if _labels(n)}).items():
            for stat in ("mean", "std", "worst"):
                if (value := getattr(spread, stat)) is not None:
                    values[(*_labels(name), stat)] = float(value)
        yield metrics.SCORE.family(values)


def _warnings(run: str, warnings: list[ModelWarning]) -> Family:
    """Every code has a series, so that an alert ends when its warning does."""
    counts = Counter(
        (run, "global" if warning.site is None else "personal", warning.code.value) for warning in warnings
    )
    series = [(run, scope, code.value) for scope in SCOPES for code in WarningCode]
    return metrics.MODEL_WARNINGS.family({labels: counts[labels] for labels in series})


def _labels(score: str) -> tuple[str, ...]:
    """Labels (scope, metric) of a score; empty for one that is not exported: recalls by class, unknown names."""
    scope, _, metric = score.partition(".")
    return (scope, metric) if scope in SCOPES and metric.removeprefix(LOCAL) in SCORES else ()


def _sites(sources: CollectorSources) -> Families:
    """Sites with an enrolled daemon, or one that is presumed to be enrolled after a restart of the server."""
    presence = sources.presence
    ages, now = presence.ages(), time.time()
    work = {site: presence.progress(site) for site in ages}
    if len(ages) > MANY_SITES:
        work = {site: progress for site, progress in work.items() if _activity(progress) is not Activity.IDLE}
    reported = {site: progress for site, progress in work.items() if progress is not None}
    # A time, not an age: Prometheus computes `time() - x`, which keeps growing when scrapes fail.
    yield metrics.LAST_PROGRESS.family({(site,): now - age for site, age in ages.items()})
    yield metrics.PROGRESS.family({(site,): progress.share or 0.0 for site, progress in reported.items()})
    yield metrics.SITE_EPOCH.family({(site,): progress.epoch for site, progress in reported.items()})
    activities = {site: _activity(progress) for site, progress in work.items() if presence.look(site) is not None}
    values: dict[tuple[str, ...], float] = {
        (site, label.value): float(label is activity) for site, activity in activities.items() for label in Activity
    }
    yield metrics.SITE_PHASE.family(values)


def _activity(progress: Progress | None) -> Activity:
    return Activity.IDLE if progress is None else progress.activity


def _known_sites(sources: CollectorSources) -> Families:
    """All sites that ever enrolled, or that the operator excluded before they did; each in exactly one state."""
    presence = sources.presence
    sites = sources.records.sites()
    states = [_site_state(presence, site, sources.runs.stall_timeout_s) for site in sites]
    yield metrics.SITES.family({(state,): states.count(state) for state in SITE_STATES})
    yield metrics.SITE_REGISTERED.family({(site,): float(presence.look(site) is not None) for site in sites})


def _site_state(presence: SitePresence, site: SiteId, stall_timeout_s: float) -> str:
    """One of `SITE_STATES`."""
    if presence.exclusion(site) is not None:
        return "excluded"
    if (daemon := presence.look(site)) is None:
        return "away"
    if presence.pause_reason(site):
        return "held"
    age_s, _ = daemon
    if age_s > stall_timeout_s:
        return "silent"
    return "idle" if _activity(presence.progress(site)) in (Activity.IDLE, Activity.FAILED) else "working"


def _telemetry(sources: CollectorSources) -> Families:
    """Numbers of sites' machines that their heartbeats carry, as far as each site's policy allows."""
    telemetry = {site: sources.presence.telemetry(site) for site in sources.presence.ages()}
    for name, metric in metrics.TELEMETRY.items():
        yield metric.family({(site,): numbers[name] for site, numbers in telemetry.items() if name in numbers})


def _certificates(sources: CollectorSources) -> Families:
    """When the last certificate of each name ends; revoked ones do not count, or their expiry would raise alerts."""
    ends = dict[tuple[str, ...], float]()
    if sources.identity is not None:
        certificate = sources.identity.current().certificate
        ends["server", certificate.name] = certificate.not_after.timestamp()
    for row in sources.certificates.all():
        if row.revoked_at is None:
            key = (row.party, row.name)
            ends[key] = max(row.not_after, ends.get(key, row.not_after))
    yield metrics.CERT_EXPIRY.family(ends)


def _disk(sources: CollectorSources) -> Families:
    folders, blobs = [sources.state], sources.state / BLOBS
    if blobs.exists():  # it may be a link to a disk of its own
        folders.append(blobs)
    free = min(shutil.disk_usage(folder).free for folder in folders)
    yield metrics.STATE_DISK_FREE.family({(): free})


def _one_hot(metric: Metric, run: str, current: str, phase_names: Iterable[str]) -> Family:
    return metric.family({(run, name): float(name == current) for name in phase_names})
