"""How much sites have trained, counted by the simulation: what their methods really do, not what the plan says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from protofed.common.config.recipe import Recipe
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import Task, TaskKind
from protofed.deploy.simulation.simulation import Simulation, simulation
from protofed.deploy.simulation.sites import TrainingLog
from protofed.server.rounds.machine.phases import Collecting
from protofed.testing.local_pool import LocalPool

RecipeOf = Callable[..., Recipe]
# Epochs of a fit whose plan says 2, by the methods' own definitions.
EPOCHS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "fedavg": ({}, 2),
    "fedrep": ({"head_epochs": 3}, 3 + 2),
    "fedbabu": ({"finetune_epochs": 4}, 2 + 4),
    "ditto": ({}, 2 + 2),
    "apfl": ({}, 2 + 2),  # its second model steps on the same batches
    "fedrod": ({}, 2 + 2),
}


def epochs(running: Simulation) -> dict[int, set[float]]:
    held = {site: len(data.train) for site, data in running.data.items()}
    by_round = running.training.by_round()
    return {number: {examples / held[site] for site, examples in of.items()} for number, of in by_round.items()}


@pytest.mark.parametrize("method", EPOCHS)
def test_every_epoch_that_a_method_trains_is_counted(method: str, recipe_of: RecipeOf) -> None:
    options, expected = EPOCHS[method]
    plan = {**recipe_of(method).plan.model_dump(), "epochs": 2}
    with simulation(recipe_of(method, rounds=2, plan=plan, method={"name": method, **options})) as running:
        running.go()
        assert epochs(running) == {1: {expected}, 2: {expected}}


def test_workers_and_an_interruption_change_no_count(recipe_of: RecipeOf, tmp_path: Path) -> None:
    recipe = recipe_of("ditto", rounds=2)
    with simulation(recipe) as alone, simulation(recipe, pool=partial(LocalPool, 2)) as spread:
        alone.go()
        spread.go()
        assert spread.training.by_round() == alone.training.by_round()
    recipe = recipe_of("fedavg")
    with simulation(recipe) as whole:
        whole.go()
        expected = whole.training.by_round()
    with simulation(recipe, tmp_path) as first:
        first.go(until=lambda: isinstance(at := first.run.phase, Collecting) and at.round == 2 and bool(at.reported))
    with simulation(recipe, tmp_path) as second:
        second.go()
        assert second.training.by_round() == expected


def test_a_fit_that_begins_again_counts_once(tmp_path: Path) -> None:
    def task(number: int, name: str) -> Task:
        return Task(TaskKind.FIT, "run", number, name, None, 0, 0.0)

    log, site = TrainingLog(tmp_path / "trained.jsonl"), SiteId("site-1")
    log.note(task(1, "a"), site, 10)
    log.note(task(1, "a"), site, 10)
    log.note(task(1, "second attempt"), site, 5)
    log.note(task(2, "b"), site, 7)
    log.close()
    with (tmp_path / "trained.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"half a li')
    again = TrainingLog(tmp_path / "trained.jsonl")
    again.close()
    assert log.by_round() == again.by_round() == {1: {site: 15}, 2: {site: 7}}
