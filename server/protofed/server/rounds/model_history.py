"""Reads from the ledger what a run's models are judged by."""

from __future__ import annotations

import json

import structlog

from protofed.common.errors import ConfigError, FailureReason
from protofed.common.protocol.messages import TaskKind
from protofed.server.method import server_methods
from protofed.server.rounds.model_warnings import ModelWarning, RunHistory, TrainedRound, model_warnings
from protofed.server.rounds.score_memory import ScoreMemory
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow, RunRow, one_a_site
from protofed.server.verdicts import RejectionCode

log = structlog.get_logger()
FIRST, LAST = 3, 3  # attempts whose updates are read
UNUSABLE = (RejectionCode.NOT_FINITE, RejectionCode.NORM)


class WarningLog:
    """Logs what speaks against a run's models, each thing once; what an earlier process has logged is known.

    Args:
        scores: told of each round whose scores are closed.

    Attributes:
        now: all of it, as of the last look; may be read from any thread.
    """

    def __init__(self, records: LedgerReader, run: str, scores: ScoreMemory) -> None:
        self._records, self._run = records, run
        self._history = _History(records, run, scores)
        self.now = self._found()
        self._known = {(warning.code, warning.site) for warning in self.now}

    def look(self) -> None:
        """Log what is new since the last look."""
        self.now = self._found()
        for warning in self.now:
            if (key := (warning.code, warning.site)) not in self._known:
                self._known.add(key)
                at = {"round": warning.round, **({} if warning.site is None else {"site": warning.site})}
                log.warning("model warning", run=self._run, **at, code=warning.code.value, why=warning.text)

    def roll_back(self) -> None:
        """Read the rounds again: some were rolled back."""
        self._history.forget()
        self.now = self._found()

    def _found(self) -> list[ModelWarning]:
        row = self._records.run(self._run)
        return [] if row is None else model_warnings(self._history.of(row))


def warnings_of(records: LedgerReader, run: str) -> list[ModelWarning]:
    """All that speaks against a run's models now; nothing for a run that the ledger does not have."""
    row = records.run(run)
    return [] if row is None else model_warnings(_History(records, run, ScoreMemory(records, run)).of(row))


class _History:
    """What is known of a run's models: scores and updates of its first and last rounds, and headlines of some others.

    A later look reads only what is new.
    """

    def __init__(self, records: LedgerReader, run: str, scores: ScoreMemory) -> None:
        self._records, self._run, self._scores = records, run, scores
        self.forget()

    def forget(self) -> None:
        """Read the rounds again."""
        self._closed: list[RoundRow] = []  # the first and the last attempts that are over
        self._trained: dict[tuple[int, int], TrainedRound] = {}

    def of(self, row: RunRow) -> RunHistory:
        """As it is now."""
        recipe = json.loads(row.recipe)
        return RunHistory(
            classes=recipe["classes"],
            rounds=recipe["rounds"],
            ended=row.ended_at is not None,
            global_model=_has_global_model(recipe["method"]["name"]),
            class_names=recipe.get("class_names", ()),
            scored=self._scores.told(),
            trained=self._attempts(),
        )

    def _attempts(self) -> list[TrainedRound]:
        since = self._closed[-1].round if self._closed else 0
        later = [row for row in self._records.rounds(self._run, since=since) if row.round and _is_over(row)]
        closed = [row for row in self._closed if row.round < since] + later
        self._closed = closed if len(closed) <= FIRST + LAST else [*closed[:FIRST], *closed[-LAST:]]
        # The newest is read anew: an update of it may be refused yet, late.
        known = dict(list(self._trained.items())[:-1])
        self._trained = {
            (row.round, row.attempt): known.get((row.round, row.attempt)) or _attempt(row, self._records)
            for row in self._closed
        }
        return list(self._trained.values())


def _is_over(row: RoundRow) -> bool:
    return row.state is not None or row.abandoned is not None


def _has_global_model(method: str) -> bool:
    try:
        return server_methods.get(method).global_model
    except ConfigError:  # a plug-in's that is not installed here: its states are not compared
        return False


def _attempt(row: RoundRow, records: LedgerReader) -> TrainedRound:
    fits = [task for task in records.tasks(row.run, row.round, row.attempt) if task.kind is TaskKind.FIT]
    updates = records.updates(row.run, row.round, row.attempt)
    used = one_a_site(updates)
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
