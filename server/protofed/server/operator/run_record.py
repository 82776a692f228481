"""A run's record: all that a report shows, as plain JSON, from its ledger and the blobs that are still kept.

`Overview` is one run in short, for tables, logs and reports, from its ledger alone.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.errors import ConfigError, FailureReason, ProtofedError, short
from protofed.common.payload import Array, Part, Payload, SiteId, Tensors, unit
from protofed.common.protocol import consortium
from protofed.common.protocol.messages import (
    PROTOCOL_VERSION,
    SCORINGS,
    SUM_STEPS,
    PauseReason,
    TaskKind,
    score_family,
)
from protofed.common.protocol.scores import Spread, spreads
from protofed.common.version import VERSION
from protofed.server.rounds.aggregation.aggregation import WEIGHT_CAP
from protofed.server.rounds.aggregation.robust_rule import KEPT_ROW, kept_classes
from protofed.server.rounds.scores.best_round import Scores, first_kept, judged_rounds
from protofed.server.rounds.scores.scoring import find_warnings
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow, RunRow, TaskRow, UpdateRow
from protofed.server.verdicts import EXCLUDED, REVOKED, ROLLED_BACK, RUN_ENDED

MAX_CLASSES = 256  # with more, a matrix of all pairs is neither read nor drawn
DECIMALS = 4  # of cosines and norms: they are drawn, and a record stays a few MB


# By round and attempt, and by site: the digest of an update that was aggregated and that others may read.
UsedUpdates: TypeAlias = dict[tuple[int, int], dict[SiteId, Digest]]


class BlobReader(Protocol):
    """Read access to blobs."""

    def get(self, address: Digest) -> bytes:
        """The blob's bytes, checked against its digest; raises StateError if it is missing or damaged."""

    def has(self, address: Digest) -> bool:
        """Whether the blob exists; its bytes are not checked."""


def similarity(rounds: Sequence[RoundRow], blobs: BlobReader, classes: int) -> dict[str, Any]:
    """Cosines between the classes' prototypes, [classes, classes], in the newest state that is kept, with its round.

    A class without a prototype has None in its row and column; `cosines` is empty if the state has no prototypes.
    """
    for row in reversed(rounds):
        if row.state is None or row.rolled_back or (state := _read(blobs, row.state)) is None:
            continue
        rows = _prototypes(state.get(Part.PROTOTYPES, {}), classes)
        return {"round": row.round, "cosines": [] if rows is None else _listed(cosines(rows))}
    return {"round": None, "cosines": []}


def norms(used: UsedUpdates, rounds: Sequence[RoundRow], blobs: BlobReader, classes: int) -> dict[str, Any]:
    """Euclidean norms by class, {site: [classes]}, in the newest round whose updates are kept.

    They are norms of the head's rows if sites sent a head, else of their prototypes. If a site sent nothing for a
    class, the norm is None.
    """
    for row in reversed(rounds):
        if row.round == 0 or row.rolled_back:
            continue
        digests = used.get((row.round, row.attempt), {})
        payloads = {
            site: payload for site, address in digests.items() if (payload := _read(blobs, address)) is not None
        }
        if payloads:
            return {"round": row.round, **_site_norms(payloads, classes)}
    return {"round": None, "part": "", "sites": {}}


def cosines(rows: Array) -> Array:
    """Cosines of all pairs of rows, [classes, dim] -> [classes, classes]; NaN where a row is NaN or zero."""
    directions = unit(np.asarray(rows, dtype=float))
    directions[~np.any(directions, axis=1)] = np.nan  # a zero row has no direction; 0 would look like "orthogonal"
    return np.asarray(directions @ directions.T)


def _site_norms(payloads: Mapping[str, Payload], classes: int) -> dict[str, Any]:
    """Norms of the first part that has a row for each class."""
    for part, read in ((Part.HEAD, _head), (Part.PROTOTYPES, _prototypes)):
        matrices = {site: read(payload.get(part, {}), classes) for site, payload in payloads.items()}
        sites = {
            site: _listed(np.linalg.norm(matrix, axis=1)) for site, matrix in matrices.items() if matrix is not None
        }
        if sites:
            return {"part": str(part), "sites": sites}
    return {"part": "", "sites": {}}


def _head(tensors: Tensors, classes: int) -> Array | None:
    """The classifier's weights [classes, dim]: the last matrix, by name, with a row for each class."""
    matrices = [tensors[name] for name in sorted(tensors) if tensors[name].ndim == 2 and len(tensors[name]) == classes]
    return matrices[-1].astype(float) if matrices and classes <= MAX_CLASSES else None


def _prototypes(tensors: Tensors, classes: int) -> Array | None:
    """Prototypes [classes, dim], NaN for a class without one; methods send them as one matrix "mean" or by class."""
    if classes > MAX_CLASSES:
        return None
    if "mean" in tensors:
        return tensors["mean"].astype(float)
    by_class = {int(name): row for name, row in tensors.items() if name.isdecimal() and int(name) < classes}
    if not by_class:
        return None
    rows = np.full((classes, next(iter(by_class.values())).size), np.nan)
    for c, row in by_class.items():
        rows[c] = row.reshape(-1)
    return rows


def _read(blobs: BlobReader, address: Digest) -> Payload | None:
    """The decoded blob; None: it was discarded or is damaged, and a report shows the rest all the same."""
    if not blobs.has(address):
        return None
    try:
        return codec.decode(blobs.get(address))
    except ProtofedError:
        return None


def _listed(values: Array) -> Any:
    """Nested lists, rounded, with None for NaN and infinity, which JSON has not."""
    if values.ndim > 1:
        return [_listed(row) for row in values]
    return [round(float(value), DECIMALS) if np.isfinite(value) else None for value in values]


FORMAT = 1
AT_A_TIME = 50  # rounds whose rows are read in one query: bounds memory for runs of thousands of rounds
SCORED_CLASSES = 500  # of all rounds whose scores are read in one query: a site may have some for each class


def run_record(records: LedgerReader, blobs: BlobReader, run: str) -> dict[str, Any]:
    """The record of one run; equal ledgers and blobs give equal records.

    Times are Unix time in seconds, sizes bytes, scores as sites reported them. Its keys:

    run: name, status (completed, failed, aborted, paused or "going on"), reason, dates, fingerprint;
    recipe: as the run was started with; versions: of the software that made the record; sites: those ever invited,
    with roles, exclusion and revocation as they are now; interventions: what operators did to the run, or to a site
    while it went on, with the newest round of that time;
    rounds: every attempt with every site's task, the refused updates, the state's digest and its statistics, and
    `kept_classes`, of which a robust rule had too few rows to replace the old one;
    warnings: what speaks against the run's models as they are now, by `rounds.model_warnings`: code, round, site (null:
    the global model), text and numbers;
    scores: by round and site, without single classes, and as `sums` what secure aggregation says of them (mean,
    population standard deviation and number of sites by name); classes: those, of the newest and the best round;
    best: the best round by the score that the recipe chooses ({round, score, value}), and `kept`, the best round whose
    state is kept; None: no round has that score;
    prototypes: cosines [classes, classes] of the newest state kept; norms: {site: [classes]} of the newest updates
    kept.

    Raises:
        ConfigError: there is no such run.
    """
    row = records.run(run)
    if row is None:
        raise ConfigError(f"there is no run '{short(run)}'; `protofed runs show` has all of them")
    recipe = json.loads(row.recipe)
    rounds = records.rounds(run, rolled_back=True)
    scores = _scores(records, run, rounds, recipe["classes"])
    attempts, used = read_attempts(records, run, rounds)
    return {
        "format": FORMAT,
        "run": _run(row),
        "recipe": recipe,
        "versions": {"protofed": VERSION, "protocol": PROTOCOL_VERSION},
        "sites": _sites(records, attempts),
        "interventions": _interventions(records, row),
        "groups": [list(group) for group in records.groups(row.ended_at)],
        "partners": _partners(records, row),
        "rounds": attempts,
        "warnings": [warning.plain() for warning in find_warnings(records, run)],
        "scores": [{"round": number, **scored} for number, scored in scores.items()],
        "best": (best := find_best(records, blobs, run)),
        "classes": _by_class(records, run, scores, best),
        "prototypes": similarity(rounds, blobs, recipe["classes"]),
        "norms": norms(used, rounds, blobs, recipe["classes"]),
    }


def outcome(row: RoundRow) -> str:
    """The outcome of an attempt at a round: open, published, degraded, abandoned or rolled-back."""
    if row.rolled_back:
        return "rolled-back"
    if row.abandoned is not None:
        return "abandoned"
    if row.state is None:
        return "open"
    return "published" if row.complete else "degraded"


def find_best(records: LedgerReader, blobs: BlobReader, run: str) -> dict[str, Any] | None:
    """The best round, its score and value, and as `kept` the best of the rounds whose states are kept.

    None: no round has a score that judges it.
    """
    rounds = judged_rounds(records, run)
    if rounds is None:
        return None
    first = first_kept(records, blobs, run, rounds)
    return {**asdict(rounds.ranked[0]), "kept": None if first is None else first.round}


def _run(row: RunRow) -> dict[str, Any]:
    return {
        "name": row.run,
        "status": row.outcome or ("paused" if row.paused else "going on"),
        "reason": row.reason or "",
        "began_at": row.began_at,
        "ended_at": row.ended_at,
        "fingerprint": row.fingerprint,
    }


def _sites(records: LedgerReader, rounds: Sequence[Mapping[str, Any]]) -> dict[SiteId, dict[str, Any]]:
    """Sites that were invited at least once."""
    roles, excluded, revoked = records.sites(), records.excluded(), records.revoked()
    excluded_at = {row.site: row.at for row in records.interventions() if row.action == "excluded"}
    invited = sorted({task["site"] for attempt in rounds for task in attempt["tasks"]})
    return {
        site: {
            "roles": roles.get(site, []),
            "excluded": excluded.get(site, ""),
            "excluded_at": excluded_at.get(site) if site in excluded else None,
            "revoked": revoked[site][1] or "no reason given" if site in revoked else "",
            "revoked_at": revoked[site][0] if site in revoked else None,
        }
        for site in invited
    }


def _partners(records: LedgerReader, run: RunRow) -> dict[str, Any] | None:
    """Who runs the server, and each partner's institution, by the run's last list of partners; None: it had none."""
    if (document := records.consortium(run.ended_at)) is None:
        return None
    listed = consortium.read(document)
    institutions = {one.site: one.institution for one in listed.partners}
    return {"coordinator": listed.coordinator, "number": listed.number, "institutions": institutions}


def _interventions(records: LedgerReader, run: RunRow) -> list[dict[str, Any]]:
    """Those of the run, with the round that was open, or had closed last; None before the first round was opened."""
    openings = sorted((row.opened_at, row.round) for row in records.rounds(run.run, rolled_back=True))
    return [
        {
            "at": row.at,
            "action": row.action,
            "operator": row.operator,
            "site": row.site,
            "reason": row.reason,
            "round": next((number for opened_at, number in reversed(openings) if opened_at <= row.at), None),
        }
        for row in records.interventions()
        if row.run == run.run
    ]


def read_attempts(
    records: LedgerReader, run: str, rounds: Sequence[RoundRow]
) -> tuple[list[dict[str, Any]], UsedUpdates]:
    """These attempts with their tasks, as a record has them, and the updates that were read on the way."""
    attempts, used = list[dict[str, Any]](), UsedUpdates()
    begin, last = (rounds[0].round, rounds[-1].round) if rounds else (0, -1)
    caps = {(row.round, row.attempt): row.statistics.get(WEIGHT_CAP, math.inf) for row in rounds}
    for first in range(begin, last + 1, AT_A_TIME):
        span = range(first, min(first + AT_A_TIME, last + 1))
        commits: dict[str, list[UpdateRow]] = {}
        for update in records.updates(run, span):
            commits.setdefault(update.task.task_id, []).append(update)
            if update.counts and update.task.kind is TaskKind.FIT and update.task.sum_of is None:
                used.setdefault((update.task.round, update.task.attempt), {})[update.task.site] = update.digest
        tasks: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for task in records.tasks(run, span):
            tasks.setdefault((task.round, task.attempt), []).append(_task(task, commits.get(task.task_id, []), caps))
        attempts += [_attempt(row, tasks.get((row.round, row.attempt), [])) for row in rounds if row.round in span]
    return attempts, used


def _attempt(row: RoundRow, tasks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "round": row.round,
        "attempt": row.attempt,
        "outcome": outcome(row),
        "reason": row.abandoned or "",
        "opened_at": row.opened_at,
        "closed_at": row.closed_at,
        "size": row.size,
        "quorum": row.quorum,
        "state": row.state or "",
        "kept_classes": kept_classes(row.statistics),
        "statistics": {
            name: value
            for name, value in row.statistics.items()
            if name != WEIGHT_CAP and not name.startswith(KEPT_ROW)
        },
        "tasks": list(tasks),
    }


def _task(task: TaskRow, commits: Sequence[UpdateRow], weight_caps: Mapping[tuple[int, int], float]) -> dict[str, Any]:
    """A site's task and its outcome; `sent` (bytes) is counted as in `LedgerReader.moved`.

    `weight_capped`: the site claimed more examples than its update counts with. Neither number is in the record, which
    others are shown; the cap is a statistic of the round, and the ledger has the claim.

    Args:
        weight_caps: by round and attempt.
    """
    most = weight_caps.get((task.round, task.attempt), math.inf)
    accepted = [update for update in commits if update.is_accepted]
    return {
        "site": task.site,
        "kind": task.kind,
        "sum_of": task.sum_of or "",
        "task_status": task.task_status,
        "cause": _cause(task.reason),
        "reason": task.reason or next((update.rejected for update in accepted if update.rejected), ""),
        "sent": task.bytes_sent,
        "received": sum(update.bytes for update in accepted),
        "norm": accepted[0].norm if accepted else None,
        "weight_capped": any(update.counts and (update.weight or 0.0) > most for update in accepted),
        "loss": accepted[0].metrics.get("loss") if accepted else None,
        "refused": [_refused(update) for update in commits if not update.is_accepted],
    }


def _cause(reason: str) -> str:
    """Why a task ended but by the round; empty: by the round.

    One of excluded, revoked, paused, budget, withdrawn, run-ended and rolled-back.
    """
    if reason in (PauseReason.APPROVAL, PauseReason.SCHEDULE, PauseReason.PAUSED, PauseReason.POLICY):
        return "paused"
    if reason == PauseReason.BUDGET:
        return "budget"
    if reason in (PauseReason.WITHDRAWN, FailureReason.WITHDRAWN):
        return "withdrawn"
    started = {EXCLUDED: "excluded", REVOKED: "revoked", RUN_ENDED: "run-ended", ROLLED_BACK: "rolled-back"}
    return next((cause for beginning, cause in started.items() if reason.startswith(beginning)), "")


def _refused(update: UpdateRow) -> dict[str, Any]:
    return {
        "verdict": update.verdict,
        "code": update.code,
        "reason": update.reason,
        "bytes": update.bytes,
        "digest": update.digest,
    }


def _scores(records: LedgerReader, run: str, rounds: Sequence[RoundRow], classes: int) -> dict[int, dict[str, Any]]:
    """Scores by round, without those of single classes: 1000 classes have thousands of them a round."""
    numbers = {row.round for row in rounds if row.state is not None and not row.rolled_back}
    step = max(1, SCORED_CLASSES // classes)
    scores: dict[int, dict[str, Any]] = {}
    for first in range(0, max(numbers, default=-1) + 1, step):
        scored = _scored(records, run, range(first, first + step), by_class=False)
        scores |= {number: of for number, of in scored.items() if number in numbers}
    return scores


def _by_class(
    records: LedgerReader, run: str, scores: Mapping[int, object], best: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Scores of single classes, of the newest scored round and of the best one."""
    chosen = {"newest": max(scores, default=None), "best": None if best is None else best["round"]}
    by_round: dict[int | None, dict[str, Any]] = {
        n: _scored(records, run, range(n, n + 1), by_class=True).get(n, {}) for n in chosen.values() if n is not None
    }
    rounds = {which: {"round": n, "sites": {}, **by_round.get(n, {})} for which, n in chosen.items()}
    return {"judged_by": "" if best is None else best["score"], **rounds}


def _scored(records: LedgerReader, run: str, rounds: range, *, by_class: bool) -> dict[int, dict[str, Any]]:
    """Of each round's scores those of single classes, or the others: by site, and what secure aggregation says.

    Rounds without any are left out.
    """
    scores, score_sums = records.scores(run, rounds), records.score_sums(run, rounds)
    by_round: dict[int, dict[str, Any]] = {}
    for number in sorted(scores.keys() | score_sums.keys()):
        aggregated = score_sums.get(number, {}).items()
        chosen = {name: spread for name, spread in aggregated if (score_family(name) != name) is by_class}
        sums = {name: {"mean": of.mean, "sites": of.sites} for name, of in chosen.items()}
        sites = _select(scores.get(number, {}), by_class=by_class)
        if sites or sums:
            by_round[number] = {"sites": sites, "sums": sums} if sums else {"sites": sites}
    return by_round


def _select(sites: Scores, *, by_class: bool) -> dict[SiteId, dict[str, float]]:
    """Only scores of single classes, or only the others; sites without any are left out."""
    selected = {
        site: {name: value for name, value in scores.items() if (score_family(name) != name) is by_class}
        for site, scores in sites.items()
    }
    return {site: scores for site, scores in selected.items() if scores}


@dataclass(frozen=True)
class Overview:
    """A run's progress.

    Attributes:
        began: a round was opened.
        phase: in words: "not started", "making the model", "collecting", "summing: <step>", "refining",
            "evaluating", "waiting", "abandoned: <reason>", or how the run ended.
        invited, reported: sites of the current (or last) round's fits.
        seconds: from the opening of the first round until the run's end, or until now.
        received, sent: bytes of accepted updates and of the models that sites were asked to fetch.
        scores: of round `scored_round`, the newest scored one, by the score's name.
        degraded: rounds that were published without some of the updates that they wanted.
        attempts: at all rounds, `abandoned` and `rolled_back` ones included.
    """

    run: str
    began: bool
    round: int
    phase: str
    invited: int
    reported: int
    received: int
    sent: int
    seconds: float
    scores: Mapping[str, Spread]
    scored_round: int
    degraded: int
    attempts: int
    abandoned: int
    rolled_back: int
    ended: bool
    failed: bool


def overview(ledger: LedgerReader, run: str) -> Overview | None:
    """Sum up a run; None: the ledger has no such run (yet)."""
    row = ledger.run(run)
    if row is None:
        return None
    history = ledger.rounds(run, rolled_back=True)
    rounds = [r for r in history if not r.rolled_back]  # the rounds that led to the current state
    last = rounds[-1] if rounds else None
    number = last.round if last else 0
    current = ledger.tasks(run, last.round, last.attempt) if last else []
    fits = [task for task in current if task.asks_for_update]
    received, sent = ledger.moved(run)
    newest = ledger.scored_round(run)
    return Overview(
        run=run,
        began=bool(rounds),
        round=number,
        phase=_phase(row, last, {task.kind for task in current}),
        invited=len(fits),
        # A site whose update was rejected did report: the aggregation left its update out later.
        reported=sum(task.task_status in ("reported", "rejected") for task in fits),
        received=received,
        sent=sent,
        seconds=(row.ended_at or time.time()) - rounds[0].opened_at if rounds else 0.0,
        scores=spreads(ledger.scores(run, newest).get(newest, {}), ledger.score_sums(run, newest).get(newest, {})),
        scored_round=newest,
        degraded=[outcome(r) for r in rounds].count("degraded"),
        attempts=len(history),
        abandoned=sum(r.abandoned is not None for r in history),
        rolled_back=len(history) - len(rounds),
        ended=row.ended_at is not None,
        failed=row.failed,
    )


def _phase(run: RunRow, last: RoundRow | None, open_kinds: Collection[TaskKind]) -> str:
    """In words.

    Args:
        open_kinds: kinds of the newest attempt's tasks.
    """
    if run.ended_at is not None:
        return run.reason or "ended"
    if last is None:
        return "not started"  # what it waits for, the queue or sites, is not known here
    if last.state is not None:
        return "evaluating" if any(kind in SCORINGS for kind in open_kinds) and not last.scored else "waiting"
    if last.abandoned is not None:
        return f"abandoned: {last.abandoned}"
    if last.aggregate is not None:
        return "refining"
    if step := next((step for step in reversed(SUM_STEPS) if step in open_kinds), None):
        return f"summing: {step}"
    return "collecting" if last.round else "making the model"
