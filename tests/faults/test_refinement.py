"""A round that an evaluator refines: the server or the evaluator is killed at every place of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.faults.conftest import SITES, ProxiedProcesses
from tests.faults.test_processes import attempts, died

from protofed.common.config.recipe import Recipe
from protofed.common.protocol.messages import TaskKind

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
MakeProcesses = Callable[[Recipe], ProxiedProcesses]
MakeRecipe = Callable[..., Recipe]
Undisturbed = Callable[[Recipe], str]
EVALUATOR = "evaluator"
# Each is reached for the first time after the death at the one before: the aggregate's blob and row, the task, the
# upload, and what is made of it.
SERVER_PLACES = (
    *("state-stored:2", "aggregate-kept", "broadcast-stored", "round-opened", "chunk-written", "upload-sealed"),
    *("commit-recorded", "aggregation-started", "aggregation-done", "state-stored", "round-published"),
)
EVALUATOR_PLACES = ("fetched", "batch-done:3", "epoch-done", "refined", "pushed")


@pytest.fixture
def refined_recipe(quick_recipe: MakeRecipe) -> Recipe:
    """FEDIC of two sites on the digits; a killed evaluator goes on behind the epochs that it had done."""
    data = {"source": "digits", "partition": {"kind": "dirichlet", "sites": 2, "beta": 0.5}, "auxiliary_per_class": 4}
    plan = {"batch_size": 16, "lr": 0.05, "checkpoint": True}
    return quick_recipe(rounds=2, method={"name": "fedic", "steps": 6}, data=data, plan=plan)


def evaluator(here: ProxiedProcesses, fails: str = "") -> None:
    here.site(EVALUATOR, "--role=evaluator", fails=fails)


def ended_like(here: ProxiedProcesses, final: str) -> None:
    """All ended well, with what a run without faults gives, and each round was trained and refined once."""
    assert here.finish(["server", EVALUATOR, *SITES]) == [0] * 4, here.logs()
    found = here.invariants(final=final)
    assert (found.published, found.updates) == (3, 2 + 2 * 3)  # two first models; two updates and a refinement a round
    assert found.recomputed >= 2
    assert attempts(here) == [(0, 1), (1, 1), (2, 1)]
    with here.ledger() as ledger:
        tasks = [task for task in ledger.tasks(here.recipe.name) if task.kind is TaskKind.REFINE]
    assert [(task.round, task.site, task.task_status) for task in tasks] == [
        (number, EVALUATOR, "reported") for number in (1, 2)
    ]


def test_row_60_71_a_server_killed_at_every_place_of_a_refinement_loses_and_doubles_nothing(
    processes_of: MakeProcesses, refined_recipe: Recipe, undisturbed: Undisturbed
) -> None:
    here = processes_of(refined_recipe)
    here.server(fails=f"{SERVER_PLACES[0]}=kill")
    here.trainers()
    evaluator(here)
    for place, after in zip(SERVER_PLACES, [*SERVER_PLACES[1:], None], strict=True):
        died(here, "server", place)
        here.server(fails=f"{after}=kill" if after else "")
    ended_like(here, undisturbed(refined_recipe))


def test_row_30_38_an_evaluator_killed_at_every_place_of_a_refinement_hands_in_once(
    processes_of: MakeProcesses, refined_recipe: Recipe, undisturbed: Undisturbed
) -> None:
    here = processes_of(refined_recipe)
    here.server()
    here.trainers()
    for place in EVALUATOR_PLACES:
        evaluator(here, fails=f"{place}=kill")
        died(here, EVALUATOR, place)
    evaluator(here)
    ended_like(here, undisturbed(refined_recipe))


def test_row_35_an_evaluator_that_comes_late_is_waited_for_and_no_site_trains_again(
    processes_of: MakeProcesses, refined_recipe: Recipe, undisturbed: Undisturbed
) -> None:
    here = processes_of(refined_recipe)
    here.server()
    here.trainers()

    def aggregated() -> bool:
        with here.ledger() as ledger:
            return any(row.aggregate is not None for row in ledger.rounds(here.recipe.name))

    here.wait_for(aggregated)
    here.kill("server")  # what it waits for is in the ledger
    here.server()
    evaluator(here)
    ended_like(here, undisturbed(refined_recipe))
