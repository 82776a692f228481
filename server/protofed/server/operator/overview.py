"""One run summed up for tables, logs and reports, from its ledger alone."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from protofed.common.protocol.messages import SCORINGS, SUM_STEPS, TaskKind
from protofed.common.protocol.scores import Spread, spreads
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow


@dataclass(frozen=True)
class Overview:
    """A run's progress.

    Attributes:
        began: a round was opened.
        phase: in words: "not begun", "making the model", "collecting", "summing: <step>", "refining",
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
        phase=row.reason or "ended" if row.ended_at else _phase(last, {task.kind for task in current}),
        invited=len(fits),
        # A site whose update was set aside did report: the aggregation left its update out later.
        reported=sum(task.task_status in ("reported", "set-aside") for task in fits),
        received=received,
        sent=sent,
        seconds=(row.ended_at or time.time()) - rounds[0].opened_at if rounds else 0.0,
        scores=spreads(ledger.scores(run, newest).get(newest, {}), ledger.score_sums(run, newest).get(newest, {})),
        scored_round=newest,
        degraded=sum(r.state is not None and r.complete is False for r in rounds),
        attempts=len(history),
        abandoned=sum(r.abandoned is not None for r in history),
        rolled_back=sum(r.rolled_back for r in history),
        ended=row.ended_at is not None,
        failed=row.failed,
    )


def _phase(last: RoundRow | None, asked: Collection[TaskKind]) -> str:
    """In words.

    Args:
        asked: kinds of the newest attempt's tasks.
    """
    if last is None:
        return "not begun"  # what it waits for, the queue or sites, is not known here
    if last.state is not None:
        return "evaluating" if any(kind in SCORINGS for kind in asked) and not last.scored else "waiting"
    if last.abandoned is not None:
        return f"abandoned: {last.abandoned}"
    if last.aggregate is not None:
        return "refining"
    if step := next((step for step in reversed(SUM_STEPS) if step in asked), None):
        return f"summing: {step}"
    return "collecting" if last.round else "making the model"
