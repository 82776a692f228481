"""All that a report says of a run, as plain JSON, from its ledger and the blobs that are still kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.errors import ConfigError, ProtofedError, short
from protofed.common.payload import Array, Part, Payload, SiteId, Tensors
from protofed.common.protocol.messages import PROTOCOL_VERSION, TaskKind, Verdict, score_family
from protofed.common.statistics import spreads
from protofed.common.tensors import unit
from protofed.common.version import VERSION
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow, RunRow, TaskRow, UpdateRow

MOST_CLASSES = 256  # of more, a matrix of all pairs is neither read nor drawn
DECIMALS = 4


class BlobReader(Protocol):
    """Blobs as a reader sees them."""

    def get(self, address: Digest) -> bytes:
        """The data, checked against its address."""

    def has(self, address: Digest) -> bool:
        """Whether it is there, sound or not."""


def similarity(rounds: Sequence[RoundRow], blobs: BlobReader, classes: int) -> dict[str, Any]:
    """Cosines between the classes' prototypes [C, C] in the newest state that is kept, with its round.

    A class without a prototype has None in its row and column; without any prototypes `cosines` is empty.
    """
    for row in reversed(rounds):
        if row.state is None or row.rolled_back or (state := _read(blobs, row.state)) is None:
            continue
        rows = _rows(state.get(Part.PROTOTYPES, {}), classes)
        return {"round": row.round, "cosines": [] if rows is None else _listed(cosines(rows))}
    return {"round": None, "cosines": []}


def norms(records: LedgerReader, rounds: Sequence[RoundRow], blobs: BlobReader, classes: int) -> dict[str, Any]:
    """Euclidean norms by class, {site: [C]}, of the newest round whose updates are kept: of the rows of the head that
    sites sent, or else of their prototypes; a class that a site sent nothing of has None.
    """
    for row in reversed(rounds):
        if row.round == 0 or row.rolled_back:
            continue
        used = [update for update in records.updates(row.run, row.round, row.attempt) if update.counts]
        found = {update.task.site: payload for update in used if (payload := _read(blobs, update.digest)) is not None}
        if found:
            return {"round": row.round, **_of_sites(found, classes)}
    return {"round": None, "part": "", "sites": {}}


def cosines(rows: Array) -> Array:
    """Of all pairs of rows, [C, D] -> [C, C]; NaN with a row that is NaN or zero: it has no direction."""
    directions = unit(np.asarray(rows, dtype=float))
    directions[~np.any(directions, axis=1)] = np.nan
    return np.asarray(directions @ directions.T)


def _of_sites(payloads: Mapping[str, Payload], classes: int) -> dict[str, Any]:
    """Of the first part that says something of classes."""
    for part, read in ((Part.HEAD, _head), (Part.PROTOTYPES, _rows)):
        rows = {site: read(payload.get(part, {}), classes) for site, payload in payloads.items()}
        told = {site: _listed(np.linalg.norm(found, axis=1)) for site, found in rows.items() if found is not None}
        if told:
            return {"part": str(part), "sites": told}
    return {"part": "", "sites": {}}


def _head(tensors: Tensors, classes: int) -> Array | None:
    """The last matrix with a row a class, [C, D]; None: there is none."""
    found = [tensors[name] for name in sorted(tensors) if tensors[name].ndim == 2 and len(tensors[name]) == classes]
    return found[-1].astype(float) if found and classes <= MOST_CLASSES else None


def _rows(tensors: Tensors, classes: int) -> Array | None:
    """Prototypes [C, D], NaN where a class has none: they come as one matrix, or by class; None: there are none."""
    if classes > MOST_CLASSES:
        return None
    if "mean" in tensors:
        return tensors["mean"].astype(float)
    known = {int(name): row for name, row in tensors.items() if name.isdecimal() and int(name) < classes}
    if not known:
        return None
    rows = np.full((classes, next(iter(known.values())).size), np.nan)
    for c, row in known.items():
        rows[c] = row.reshape(-1)
    return rows


def _read(blobs: BlobReader, address: Digest) -> Payload | None:
    """None: it is not kept any more, or not sound."""
    if not blobs.has(address):
        return None
    try:
        return codec.decode(blobs.get(address))
    except ProtofedError:
        return None


def _listed(values: Array) -> Any:
    """As nested lists, rounded, with None for what is no number."""
    if values.ndim > 1:
        return [_listed(row) for row in values]
    return [round(float(value), DECIMALS) if np.isfinite(value) else None for value in values]


FORMAT = 1
AT_A_TIME = 50  # rounds whose rows are read at once
JUDGED_BY = (  # the first of these that was scored says which round was the best
    "global.accuracy",
    "personal.local.accuracy",
    "personal.pm_v",
    "personal.balanced_accuracy",
    "personal.accuracy",
    "global.local.accuracy",
)
Scores = Mapping[SiteId, Mapping[str, float]]


def run_record(records: LedgerReader, blobs: BlobReader, run: str) -> dict[str, Any]:
    """A run, whole; equal ledgers and blobs give equal run records.

    Times are seconds of the Unix epoch, sizes bytes, scores as sites reported them. Its keys:

    run: name, status (completed, failed, aborted, paused or "going on"), reason, dates, fingerprint;
    recipe: as it was begun; versions: of the software that made the run record; sites: those that were invited;
    rounds: every attempt with every site's task, the refused updates, the digest of the state, and statistics;
    scores: by round and site, without those of single classes; classes: of the newest and the best scored round, all;
    prototypes: cosines [C, C] of the newest state that is kept; norms: by site [C], of the newest updates that are.

    Raises:
        ConfigError: there is no such run.
    """
    row = records.run(run)
    if row is None:
        raise ConfigError(f"there is no run '{short(run)}'; `protofed runs list` has all of them")
    recipe = json.loads(row.recipe)
    rounds = records.rounds(run, rolled_back=True)
    scores, attempts = _scores(records, run, rounds), _attempts(records, run, rounds)
    return {
        "format": FORMAT,
        "run": _run(row),
        "recipe": recipe,
        "versions": {"protofed": VERSION, "protocol": PROTOCOL_VERSION},
        "sites": _sites(records, attempts),
        "rounds": attempts,
        "scores": [{"round": number, "sites": sites} for number, sites in scores.items()],
        "classes": _by_class(records, run, scores),
        "prototypes": similarity(rounds, blobs, recipe["classes"]),
        "norms": norms(records, rounds, blobs, recipe["classes"]),
    }


def outcome(row: RoundRow) -> str:
    """What became of an attempt: open, published, degraded, abandoned or rolled-back."""
    if row.rolled_back:
        return "rolled-back"
    if row.abandoned is not None:
        return "abandoned"
    if row.state is None:
        return "open"
    return "published" if row.complete else "degraded"


def best_round(scores: Mapping[int, Scores]) -> tuple[int, str] | None:
    """The round with the largest mean over sites, the first of equals, and the score that says so."""
    for name in JUDGED_BY:
        means = {number: found[name].mean for number, sites in scores.items() if name in (found := spreads(sites))}
        if means:
            return max(means, key=lambda number: (means[number], -number)), name
    return None


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
    """Those that were invited at least once."""
    roles, excluded = records.sites(), records.excluded()
    invited = sorted({task["site"] for one in rounds for task in one["tasks"]})
    return {site: {"roles": roles.get(site, []), "excluded": excluded.get(site, "")} for site in invited}


def _attempts(records: LedgerReader, run: str, rounds: Sequence[RoundRow]) -> list[dict[str, Any]]:
    """All of them, read some rounds at a time."""
    found: list[dict[str, Any]] = []
    last = rounds[-1].round if rounds else -1
    for first in range(0, last + 1, AT_A_TIME):
        span = range(first, first + AT_A_TIME)
        commits: dict[str, list[UpdateRow]] = {}
        for update in records.updates(run, span):
            commits.setdefault(update.task.task_id, []).append(update)
        statuses: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for task in records.tasks(run, span):
            statuses.setdefault((task.round, task.attempt), []).append(
                _task_status(task, commits.get(task.task_id, []))
            )
        found += [_attempt(row, statuses.get((row.round, row.attempt), [])) for row in rounds if row.round in span]
    return found


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
        "statistics": dict(row.statistics),
        "tasks": list(tasks),
    }


def _task_status(task: TaskRow, commits: Sequence[UpdateRow]) -> dict[str, Any]:
    """What became of an invitation; `sent` counts as `LedgerReader.moved` does."""
    taken = [update for update in commits if update.verdict is Verdict.ACCEPTED]
    refused = [update for update in commits if update.verdict is not Verdict.ACCEPTED]
    return {
        "site": task.site,
        "kind": task.kind,
        "task_status": task.task_status,
        "reason": task.reason or next((update.set_aside for update in taken if update.set_aside), ""),
        "sent": task.base_bytes if task.kind is TaskKind.FIT else 0,
        "received": sum(update.bytes for update in taken),
        "norm": taken[0].norm if taken else None,
        "loss": taken[0].metrics.get("loss") if taken else None,
        "refused": [_refused(update) for update in refused],
    }


def _refused(update: UpdateRow) -> dict[str, Any]:
    facts = {"verdict": update.verdict, "code": update.code, "reason": update.reason}
    return {**facts, "bytes": update.bytes, "digest": update.digest}


def _scores(records: LedgerReader, run: str, rounds: Sequence[RoundRow]) -> dict[int, Scores]:
    """By round, without those of single classes, which are many: one round at a time is read."""
    numbers = sorted({row.round for row in rounds if row.state is not None and not row.rolled_back})
    found = {number: records.scores(run, number).get(number, {}) for number in numbers}
    return {number: _told(sites, by_class=False) for number, sites in found.items() if sites}


def _by_class(records: LedgerReader, run: str, scores: Mapping[int, Scores]) -> dict[str, Any]:
    """The scores of single classes, of the newest scored round and of the best one."""
    best = best_round(scores)
    chosen = {"newest": max(scores, default=None), "best": None if best is None else best[0]}
    read = {n: _told(records.scores(run, n).get(n, {}), by_class=True) for n in chosen.values() if n is not None}
    told = {which: {"round": n, "sites": {} if n is None else read[n]} for which, n in chosen.items()}
    return {"judged_by": "" if best is None else best[1], **told}


def _told(sites: Scores, *, by_class: bool) -> dict[SiteId, dict[str, float]]:
    """Only those of single classes, or only the others."""
    told = {s: {n: v for n, v in own.items() if (score_family(n) != n) is by_class} for s, own in sites.items()}
    return {site: own for site, own in told.items() if own}
