"""A round that an evaluator refines: the server or the evaluator is killed at every place of it."""

from __future__ import annotations

import pytest
from tests.faults.conftest import MakeRun, ProxiedProcesses

from protofed.common.protocol.messages import TaskKind

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
EVALUATOR = "evaluator"
# Each is reached for the first time after the death at the one before: the aggregate's blob and row, the task, the
# upload, and what is made of it.
SERVER_PLACES = (
    *("state-stored:2", "aggregate-kept", "broadcast-stored", "round-opened", "chunk-written", "upload-sealed"),
    *("commit-recorded", "aggregation-started", "aggregation-done", "state-stored", "round-published"),
)
EVALUATOR_PLACES = ("fetched", "batch-done:3", "epoch-done", "refined", "pushed")


@pytest.fixture
def here(make_run: MakeRun) -> ProxiedProcesses:
    """FEDIC of two sites on the digits; a killed evaluator goes on behind the epochs that it had done."""
    data = {"source": "digits", "partition": {"kind": "dirichlet", "sites": 2, "beta": 0.5}, "auxiliary_per_class": 4}
    plan = {"batch_size": 16, "lr": 0.05, "checkpoint": True}
    return make_run(rounds=2, method={"name": "fedic", "steps": 6}, data=data, plan=plan)


def evaluator(here: ProxiedProcesses, fails: str = "") -> None:
    here.site(EVALUATOR, "--role=evaluator", fails=fails)


def check_end(here: ProxiedProcesses) -> None:
    """All ended well, and each round was trained and refined once."""
    here.ended_like_undisturbed(EVALUATOR, updates=2)
    assert here.attempts() == [(0, 1), (1, 1), (2, 1)]
    with here.ledger() as ledger:
        tasks = [task for task in ledger.tasks(here.recipe.name) if task.kind is TaskKind.REFINE]
    assert [(task.round, task.site, task.task_status) for task in tasks] == [
        (number, EVALUATOR, "reported") for number in (1, 2)
    ]


def test_row_60_71_a_server_killed_at_every_place_of_a_refinement_loses_and_doubles_nothing(
    here: ProxiedProcesses,
) -> None:
    here.server(fails=f"{SERVER_PLACES[0]}=kill")
    here.trainers()
    evaluator(here)
    here.die_at_each("server", SERVER_PLACES, lambda fails: here.server(fails=fails))
    check_end(here)


def test_row_30_38_an_evaluator_killed_at_every_place_of_a_refinement_hands_in_once(
    here: ProxiedProcesses,
) -> None:
    here.server()
    here.trainers()
    evaluator(here, f"{EVALUATOR_PLACES[0]}=kill")
    here.die_at_each(EVALUATOR, EVALUATOR_PLACES, lambda fails: evaluator(here, fails))
    check_end(here)


def test_row_35_an_evaluator_that_comes_late_is_waited_for_and_no_site_trains_again(
    here: ProxiedProcesses,
) -> None:
    here.server()
    here.trainers()

    def aggregated() -> bool:
        with here.ledger() as ledger:
            return any(row.aggregate is not None for row in ledger.rounds(here.recipe.name))

    here.wait_for(aggregated)
    here.kill("server")  # what it waits for is in the ledger
    here.server()
    evaluator(here)
    check_end(here)
