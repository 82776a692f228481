"""Where a restarted server continues: the phase of a run as a pure function of its ledger rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from protofed.common.config.recipe import Federation, Recipe, parse_json
from protofed.common.errors import StateError
from protofed.common.protocol.messages import TaskKind
from protofed.server.rounds.phases import NOBODY, Aggregating, Collecting, Evaluating, Idle, Phase, Sites
from protofed.server.storage.rows import RoundRow, RunRow, TaskRow

FORMER_DEFAULTS = {"outlier_factor": 100.0}  # of [federation] in 0.2.0; ledgers hold recipes with their defaults


def resumed(last: RoundRow, tasks: Sequence[TaskRow], now: float, tries: int, required: Sites) -> Phase:
    """The phase after a restart.

    Args:
        last: the newest attempt.
        tasks: its invitations, those to score its model among them.
        now: seconds of the new process's monotonic clock; deadlines begin again.
        tries: attempts at its round that were abandoned.
        required: sites without which no round counts, round 0 excepted.
    """
    scorings = [task for task in tasks if task.kind is TaskKind.SCORE]
    if last.state is not None and scorings:
        return Evaluating(last.round, frozenset(task.site for task in scorings if task.is_open), now)
    if last.state is not None:  # published, but the process died before it asked for scores
        return Aggregating(last.round, last.attempt, frozenset())
    if last.abandoned is not None:
        return Idle(last.round, tries)
    statuses = ("reported", "set-aside", "failed")
    by_status = {
        task_status: frozenset(task.site for task in tasks if task.task_status == task_status)
        for task_status in statuses
    }
    collecting = Collecting(
        last.round,
        last.attempt,
        frozenset(task.site for task in tasks),
        last.size,
        last.quorum,
        opened=now,
        reported=by_status["reported"] | by_status["set-aside"],  # set aside: the aggregation had begun, all had come
        failed=by_status["failed"],
        required=required if last.round else NOBODY,
        tries=tries,
    )
    return replace(collecting, quorum_at=now) if collecting.has_quorum else collecting


def recipe_of(row: RunRow) -> Recipe:
    """The recipe that a run began with; keys of later versions have their defaults.

    Raises:
        ConfigError: this version cannot read it.
    """
    return parse_json(row.recipe, Recipe, f"the recipe of run '{row.run}' in the ledger")


def check_same(recipe: Recipe, known: RunRow) -> None:
    """Check that a run continues with the recipe that it began with.

    A default that has changed since the run began is no difference: the run goes on with the present one.

    Raises:
        StateError: it was begun with another one.
    """
    began_with = recipe_of(known)
    rules = began_with.federation
    changed = {
        key: getattr(Federation(), key)
        for key, former in FORMER_DEFAULTS.items()
        if getattr(rules, key) == former and getattr(recipe.federation, key) == getattr(Federation(), key)
    }
    began_with = began_with.model_copy(update={"federation": rules.model_copy(update=changed)})
    if recipe.fingerprint() != began_with.fingerprint():
        raise StateError(
            f"the state folder holds a run '{recipe.name}' of another recipe; give the recipe another name, "
            "or the server another state folder"
        )
