"""A run with patience ends after the same round with the same bytes, simulated or over gRPC, in one go or in two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from protofed.common.config.recipe import Recipe
from protofed.deploy.simulation.simulation import agents_of, simulation
from protofed.server.operator.run_record import overview
from protofed.server.rounds.machine.phases import Evaluating
from protofed.server.rounds.scores.best_round import best_kept

RecipeOf = Callable[..., Recipe]
REASON = "stopped early after round 2: global.accuracy no better by 1 since round 1"


def impatient(recipe_of: RecipeOf) -> Recipe:
    """No share improves by 1, so the second round is no better than the first."""
    rules = {"best_by": "global.accuracy", "patience": 1, "min_improvement": 1.0}
    return recipe_of("fedavg", rounds=5, federation={**recipe_of("fedavg").federation.model_dump(), **rules})


def end(runs: Any, ledger: Any, run: str) -> tuple[str, int, str, Any]:
    view = overview(ledger, run)
    assert view is not None
    return view.phase, view.round, runs.of(run).published.address, ledger.scores(run)


def test_grpc_ends_where_the_simulation_ends_also_across_a_restart(
    recipe_of: RecipeOf, live_server: Callable[..., Any], linked: Callable[[str], Any], tmp_path: Path
) -> None:
    recipe = impatient(recipe_of)
    with simulation(recipe) as running:
        running.go()
        expected = end(running.runs, running.ledger, recipe.name)
        assert best_kept(running.ledger, running.blobs, recipe.name) is not None
    assert expected[:2] == (REASON, 2)
    with simulation(recipe, tmp_path / "two") as first:  # interrupted while round 2 is scored
        first.go(until=lambda: isinstance(phase := first.run.phase, Evaluating) and phase.round == 2)
    with simulation(recipe, tmp_path / "two") as second:
        second.go()
        assert end(second.runs, second.ledger, recipe.name) == expected
    server = live_server(recipe)
    agents = agents_of(recipe, linked(server.address))
    while not server.runs.finished:
        for agent in agents:
            agent.step(0.0)
    assert end(server.runs, server.ledger, recipe.name) == expected
