"""A simulation: what it counts, how it ends or goes on, and what it says when it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from tests.conftest import Mount

from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import PolicyRules
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, OutOfSpaceError, StateError
from protofed.common.payload import SiteId
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import build_agents, everything, simulation
from protofed.server.operator.run_record import overview
from protofed.server.rounds.aggregation import aggregation
from protofed.server.rounds.machine.phases import Evaluating
from protofed.server.rounds.machine.waiting import Waiting, WaitReason
from protofed.server.rounds.run import Run
from protofed.server.rounds.scores.best_round import best_kept

RecipeOf = Callable[..., Recipe]


def told(recipe: Recipe, policy: Policy | None = None) -> tuple[str, list[str], str]:
    """The error that the run ends in, the reasons of failed runs, and what was refused."""
    with simulation(recipe, policy=policy) as running:
        error = ""
        try:
            running.go()
        except ConfigError as stuck:
            error = str(stuck)
        return error, running.runs.failed, running.refused


def federation(recipe: Recipe, **changes: Any) -> dict[str, Any]:
    return {**recipe.federation.model_dump(exclude_defaults=True), **changes}


def test_what_keeps_a_run_from_going_on_is_named(recipe_of: RecipeOf) -> None:
    recipe = recipe_of("fedavg", federation={"min_sites": 4, "quorum": 3})
    error, failed, refused = told(recipe)
    for phrase in ("round 1 needs 4 trainers, has 3", "min_sites is 4", "quorum 3"):
        assert phrase in error
    assert (failed, refused) == ([], "")
    rules = federation(recipe_of("fedavg"), required_sites=["hospital"])
    error, _, _ = told(recipe_of("fedavg", federation=rules))
    assert "hospital" in error
    assert "min_sites" not in error
    recipe = recipe_of("fedavg")
    rules = federation(recipe, max_relative_norm=1e-6, max_attempts=1)
    _, failed, refused = told(recipe_of("fedavg", federation=rules))
    assert len(failed) == 1
    assert "the server, of site-" in refused
    assert "this run accepts at most" in refused


@pytest.mark.parametrize("size", ["600k", "3m"])
def test_a_full_disk_is_the_simulations_and_names_its_folder(size: str, tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path / "small", f"size={size}")
    state = tmp_path / "small" / "state"
    recipe, said = shipped.recipe("digits-fednh", ["rounds=9"]), f"^the disk of {state}, which keeps this simulation"
    with pytest.raises(OutOfSpaceError, match=said) as full, simulation(recipe, state) as running:
        running.go()
    assert full.value.exit_code == StateError.exit_code
    assert "server's disk" not in str(full.value)


def test_a_run_that_waits_for_space_ends_in_a_full_disk_and_no_wrong_setting(
    recipe_of: RecipeOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "waiting", lambda *_: Waiting(WaitReason.DISK, 1))
    recipe = recipe_of("fedavg", federation={"min_sites": 4, "quorum": 3})
    with pytest.raises(OutOfSpaceError, match=str(tmp_path)), simulation(recipe, tmp_path) as running:
        running.go()


def test_what_a_sites_policy_refuses_is_told(recipe_of: RecipeOf) -> None:
    data = {"source": "digits", "partition": {"kind": "dirichlet", "sites": 5, "beta": 5.0}}
    recipe = recipe_of("fednh", data=data)
    rules = PolicyRules.model_validate({**dict(everything(recipe).rules), "parts": frozenset({"body"})})
    _, failed, refused = told(recipe, Policy(rules))
    assert len(failed) == 1
    assert "the policy of site-1, site-2, site-3 and 1 more: " in refused  # the fifth was not asked any more


def test_a_simulation_counts_for_itself(recipe_of: Callable[..., Recipe]) -> None:
    def counted(metrics: Any, name: str, **labels: str) -> float | None:
        found: float | None = metrics.registry.get_sample_value(f"protofed_{name}", labels)
        return found

    with simulation(recipe_of("fednh")) as running, simulation(recipe_of("fedavg")) as other:
        running.go()
        metrics = running.runs._context.metrics
        accepted, rounds = len(running.ledger.updates(running.recipe.name)), running.ledger.rounds(running.recipe.name)
        assert (
            counted(metrics, "updates_total", verdict="accepted", reason="") == accepted == 2 + 9
        )  # first models, updates
        assert counted(metrics, "rounds_total", outcome="committed") == len(rounds) == 4
        assert counted(metrics, "round_seconds_sum", phase="collecting") == 0  # time stands still
        assert counted(other.runs._context.metrics, "rounds_total", outcome="committed") == 0
        figures = [row.statistics for row in rounds]
    assert "prototype_shift" not in figures[0]
    assert all(found["classes_covered"] == 10 and found["prototype_shift"] > 0 for found in figures[1:])
    assert not [family.name for family in REGISTRY.collect() if family.name.startswith("protofed")]


ABANDONED = 2  # the round whose first attempt is


@pytest.mark.parametrize("recipe", ["digits-fedper", "digits-scaffold"])
def test_sites_begin_a_round_again_where_its_first_attempt_did(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedPer keeps its heads, SCAFFOLD its control variates: after the first attempt they have moved already."""
    known = shipped.recipe(recipe, ["rounds=3", "data.partition.sites=3", "federation.min_sites=3", "plan.epochs=1"])

    def states(folder: Path | None) -> list[tuple[int, int, str | None]]:
        asked: list[float] = []

        def outliers(norms: Mapping[SiteId, float], _factor: float | None) -> dict[SiteId, str]:
            asked.append(len(norms))
            return dict.fromkeys(norms, "a test says so") if len(asked) == ABANDONED else {}

        monkeypatch.setattr(aggregation, "outliers", outliers)
        with simulation(known, folder) as running:
            running.go()
            return [(row.round, row.attempt, row.state) for row in running.ledger.rounds(known.name)]

    in_memory = states(None)
    assert [row[:2] for row in in_memory] == [(0, 1), (1, 1), (2, 1), (2, 2), (3, 1)]
    assert in_memory == states(tmp_path)


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
    agents = build_agents(recipe, linked(server.address))
    while not server.runs.finished:
        for agent in agents:
            agent.step(0.0)
    assert end(server.runs, server.ledger, recipe.name) == expected
