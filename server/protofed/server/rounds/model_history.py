"""Reads from the ledger what a run's models are judged by."""

from __future__ import annotations

import json

import structlog

from protofed.common.errors import ConfigError, FailureReason
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import TaskKind
from protofed.server.method import server_methods
from protofed.server.rounds.model_warnings import (
    ACCURACY,
    BALANCED,
    SAME_ROUNDS,
    ModelWarning,
    RunHistory,
    ScoredRound,
    TrainedRound,
    model_warnings,
)
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow, RunRow
from protofed.server.verdicts import RejectionCode

log = structlog.get_logger()
# Of all rounds, these alone are read, and of one model: a run of a thousand rounds and sites has millions of scores.
HEADLINES = BALANCED, ACCURACY
FIRST, LAST = 3, 3  # attempts whose updates are read
UNUSABLE = (RejectionCode.NOT_FINITE, RejectionCode.NORM)


class WarningLog:
    """Logs what speaks against a run's models, each thing once; what an earlier process has logged is known."""

    def __init__(self, records: LedgerReader, run: str) -> None:
        self._records, self._run = records, run
        self._known = {(warning.code, warning.site) for warning in warnings_of(records, run)}

    def look(self) -> None:
        """Log what is new since the last look."""
        for warning in warnings_of(self._records, self._run):
            if (key := (warning.code, warning.site)) not in self._known:
                self._known.add(key)
                at = {"round": warning.round, **({} if warning.site is None else {"site": warning.site})}
                log.warning("model warning", run=self._run, **at, code=warning.code.value, why=warning.text)


def warnings_of(records: LedgerReader, run: str) -> list[ModelWarning]:
    """All that speaks against a run's models now; nothing for a run that the ledger does not have."""
    row = records.run(run)
    return [] if row is None else model_warnings(history_of(records, row))


def history_of(records: LedgerReader, row: RunRow) -> RunHistory:
    """What is known of a run's models: scores and updates of its first and last rounds, headlines of all."""
    recipe = json.loads(row.recipe)
    return RunHistory(
        classes=recipe["classes"],
        rounds=recipe["rounds"],
        ended=row.ended_at is not None,
        global_model=_has_global_model(recipe["method"]["name"]),
        class_names=recipe.get("class_names", ()),
        scored=_scored(records, row.run),
        trained=_trained(records, row.run),
    )


def _has_global_model(method: str) -> bool:
    try:
        return server_methods.get(method).global_model
    except ConfigError:  # a plug-in's that is not installed here: its states are not compared
        return False


def _scored(records: LedgerReader, run: str) -> list[ScoredRound]:
    headlines = _headlines(records, run, "global") or _headlines(records, run, "global.local")
    numbers = records.scored_rounds(run)
    whole = {number: records.scores(run, number).get(number, {}) for number in {*numbers[:1], *numbers[-SAME_ROUNDS:]}}
    return [ScoredRound(number, whole.get(number) or headlines.get(number, {})) for number in numbers]


def _headlines(records: LedgerReader, run: str, model: str) -> dict[int, dict[SiteId, dict[str, float]]]:
    return records.scores(run, names=[f"{model}.{score}" for score in HEADLINES])


def _trained(records: LedgerReader, run: str) -> list[TrainedRound]:
    closed = [row for row in records.rounds(run) if row.round and (row.state is not None or row.abandoned is not None)]
    chosen = closed if len(closed) <= FIRST + LAST else [*closed[:FIRST], *closed[-LAST:]]
    return [_attempt(row, records) for row in chosen]


def _attempt(row: RoundRow, records: LedgerReader) -> TrainedRound:
    fits = [task for task in records.tasks(row.run, row.round, row.attempt) if task.kind is TaskKind.FIT]
    updates = records.updates(row.run, row.round, row.attempt)
    used = [update for update in updates if update.counts]
    refused = {update.task.site for update in updates if update.code in UNUSABLE}
    failed = {task.site for task in fits if task.reason == FailureReason.NUMERIC}
    answered = {update.task.site for update in used}  # a site may send a sound update after a refused one
    return TrainedRound(
        row.round,
        row.state,
        losses=[update.metrics["loss"] for update in used if "loss" in update.metrics],
        norms=[update.norm for update in used if update.norm is not None],
        invited=len(fits),
        unusable=len((refused | failed) - answered),
    )
