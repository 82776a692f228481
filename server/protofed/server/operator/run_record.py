"""All that a report says of a run, as plain JSON, from its ledger and the blobs that are still kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from protofed.common.errors import ConfigError, short
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import PROTOCOL_VERSION, TaskKind, Verdict, score_family
from protofed.common.statistics import spreads
from protofed.common.version import VERSION
from protofed.server.operator.run_record_models import BlobReader, norms, similarity
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow, RunRow, TaskRow, UpdateRow

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


def dossier(records: LedgerReader, blobs: BlobReader, run: str) -> dict[str, Any]:
    """A run, whole; equal ledgers and blobs give equal dossiers.

    Times are seconds of the Unix epoch, sizes bytes, scores as sites reported them. Its keys:

    run: name, standing (completed, failed, aborted, paused or "going on"), reason, dates, fingerprint;
    recipe: as it was begun; versions: of the software that made the dossier; sites: those that were invited;
    rounds: every attempt with every site's fate, the refused updates, the digest of the state, and figures;
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
        "standing": row.outcome or ("paused" if row.paused else "going on"),
        "reason": row.reason or "",
        "began_at": row.began_at,
        "ended_at": row.ended_at,
        "fingerprint": row.fingerprint,
    }


def _sites(records: LedgerReader, rounds: Sequence[Mapping[str, Any]]) -> dict[SiteId, dict[str, Any]]:
    """Those that were invited at least once."""
    roles, excluded = records.sites(), records.excluded()
    invited = sorted({fate["site"] for one in rounds for fate in one["fates"]})
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
        fates: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for task in records.tasks(run, span):
            fates.setdefault((task.round, task.attempt), []).append(_fate(task, commits.get(task.task_id, [])))
        found += [_attempt(row, fates.get((row.round, row.attempt), [])) for row in rounds if row.round in span]
    return found


def _attempt(row: RoundRow, fates: Sequence[dict[str, Any]]) -> dict[str, Any]:
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
        "figures": dict(row.figures),
        "fates": list(fates),
    }


def _fate(task: TaskRow, commits: Sequence[UpdateRow]) -> dict[str, Any]:
    """What became of an invitation; `sent` counts as `LedgerReader.moved` does."""
    taken = [update for update in commits if update.verdict is Verdict.ACCEPTED]
    refused = [update for update in commits if update.verdict is not Verdict.ACCEPTED]
    return {
        "site": task.site,
        "kind": task.kind,
        "fate": task.fate,
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
