"""Where a restarted server goes on: the phase of a run as a function of its ledger rows."""

from __future__ import annotations

from collections.abc import Sequence

from protofed.common.task import TaskKind
from protofed.server.phases import Aggregating, Collecting, Evaluating, Idle, Phase
from protofed.server.rows import RoundRow, TaskRow


def resumed(last: RoundRow, tasks: Sequence[TaskRow], now: float) -> Phase:
    """The phase after a restart.

    Args:
        last: the newest attempt.
        tasks: its invitations, those to score its model among them.
        now: seconds of the new process's monotonic clock; deadlines begin again.
    """
    scorings = [task for task in tasks if task.kind is TaskKind.SCORE]
    if last.state is not None and scorings:
        return Evaluating(last.round, frozenset(task.site for task in scorings if task.is_open), now)
    if last.state is not None:  # published, and nobody asked for scores yet
        return Aggregating(last.round, last.attempt, frozenset())
    if last.abandoned is not None:
        return Idle(last.round, last.attempt + 1)
    by_fate = {fate: frozenset(task.site for task in tasks if task.fate == fate) for fate in ("reported", "failed")}
    reported = by_fate["reported"]
    at = now if len(reported) >= last.quorum else None
    cohort = frozenset(task.site for task in tasks)
    return Collecting(
        last.round, last.attempt, cohort, last.size, last.quorum, now, reported, by_fate["failed"], quorum_at=at
    )
