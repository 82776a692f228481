"""What every method promises. A new method joins by being registered; nothing here names one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofed.client.agent.agent import Agent
from protofed.client.method import client_methods
from protofed.client.privacy.policy import GateContext, Policy, Released
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload, Update
from protofed.common.protocol.messages import Finished
from protofed.common.statistics import spreads
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import Simulation, agents_of, simulation
from protofed.server.method import server_methods
from protofed.server.operator.verification import VerificationResult, verify_round

METHODS = sorted(client_methods)
RecipeOf = Callable[..., Recipe]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def simulated(recipe_of: RecipeOf) -> Callable[[str], tuple[str, dict[int, dict[str, Any]]]]:
    """The undisturbed simulation of a method's small recipe: final digest and scores; computed once."""
    done: dict[str, tuple[str, dict[int, dict[str, Any]]]] = {}

    def run(method: str) -> tuple[str, dict[int, dict[str, Any]]]:
        if method not in done:
            with simulation(recipe_of(method)) as running:
                running.go()
                done[method] = (_digest(running), running.ledger.scores(running.recipe.name))
        return done[method]

    return run


def test_both_halves_are_registered_under_the_same_names() -> None:
    assert sorted(server_methods) == METHODS


def test_each_half_knows_the_options_of_the_other(method: str) -> None:
    assert client_methods.foreign(method) == server_methods.options(method) - client_methods.options(method)
    assert server_methods.foreign(method) == client_methods.options(method) - server_methods.options(method)


def test_halves_are_frozen(method: str) -> None:
    for half in (client_methods.get(method), server_methods.get(method)):
        assert dataclasses.is_dataclass(half)
        assert half.__dataclass_params__.frozen


def test_a_recipe_on_digits_uses_the_method(method: str) -> None:
    assert shipped.recipe(f"digits-{method}").method.name == method


def test_it_learns(method: str) -> None:
    recipe = shipped.recipe(f"digits-{method}")
    recipe = recipe.model_copy(update={"federation": recipe.federation.model_copy(update={"score_every": 0})})
    with simulation(recipe) as running:
        running.go()
        last = spreads(running.ledger.scores(recipe.name)[recipe.rounds])
    name = "global.accuracy" if server_methods.get(method).global_model else "personal.balanced_accuracy"
    assert last[name].mean > 0.4  # chance is 0.1
    assert last["personal.pm_v"].mean > 0.75


def test_two_simulations_give_the_same_bytes(
    method: str, recipe_of: RecipeOf, simulated: Callable[[str], tuple[str, Any]]
) -> None:
    with simulation(recipe_of(method)) as again:
        again.go()
        assert _digest(again) == simulated(method)[0]


def test_grpc_gives_the_bytes_and_scores_of_the_simulation(
    method: str,
    recipe_of: RecipeOf,
    simulated: Callable[[str], tuple[str, Any]],
    live_server: Callable[..., Any],
    linked: Callable[[str], Any],
) -> None:
    recipe = recipe_of(method)
    server = live_server(recipe)
    _take_turns(agents_of(recipe, linked(server.address)))
    digest, scores = simulated(method)
    assert server.runs.of(recipe.name).published.address == digest
    assert server.ledger.scores(recipe.name) == scores


def test_the_order_of_arrival_does_not_matter(
    method: str, recipe_of: RecipeOf, simulated: Callable[[str], tuple[str, Any]]
) -> None:
    with simulation(recipe_of(method)) as running:
        backwards = dataclasses.replace(running, agents=list(reversed(running.agents)))
        backwards.go()
        assert _digest(backwards) == simulated(method)[0]


def test_going_back_two_rounds_and_on_again_gives_the_same_bytes(
    method: str, recipe_of: RecipeOf, simulated: Callable[[str], tuple[str, Any]], tmp_path: Path
) -> None:
    recipe = recipe_of(method)
    with simulation(recipe, tmp_path) as running:
        running.go()
        running.runs.roll_back(recipe.name, 1)  # sites go back to what they remembered then
        assert not running.runs.finished
        running.go()
        assert (_digest(running), running.ledger.scores(recipe.name)) == simulated(method)


def test_every_published_state_comes_out_again(method: str, recipe_of: RecipeOf) -> None:
    recipe = recipe_of(method)
    with simulation(recipe) as running:
        running.go()
        published = [row for row in running.ledger.rounds(recipe.name) if row.state is not None]
        assert len(published) == recipe.rounds + 1
        for row in published[1:]:  # what round 0 was made from is no longer kept
            found = verify_round(running.ledger, running.blobs, recipe.name, row.round, row.attempt)
            assert found.finding is VerificationResult.SAME


@pytest.mark.parametrize("rounds_before", [0, 1, 2])
def test_a_restart_between_rounds_changes_nothing(
    method: str,
    rounds_before: int,
    recipe_of: RecipeOf,
    simulated: Callable[[str], tuple[str, Any]],
    tmp_path: Path,
) -> None:
    recipe = recipe_of(method)
    with simulation(recipe, tmp_path) as begun:
        begun.go(until=lambda: _published_rounds(begun) > rounds_before)
        assert not begun.runs.finished
    with simulation(recipe, tmp_path) as resumed:
        resumed.go()
        assert _digest(resumed) == simulated(method)[0]


def test_only_declared_parts_leave(method: str, recipe_of: RecipeOf, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[Released] = []
    release = Policy.release

    def recorded(policy: Policy, update: Update, background: GateContext | None = None) -> Released:
        released.append(release(policy, update, background))
        return released[-1]

    monkeypatch.setattr(Policy, "release", recorded)
    with simulation(recipe_of(method)) as running:
        running.go()
    first_model, *updates = released
    assert {spec.part for spec in first_model.manifest.tensors} == {Part.BODY, Part.HEAD}
    assert len(updates) == 3 * 3
    declared = client_methods.build(method, {}).sends
    assert {spec.part for update in updates for spec in update.manifest.tensors} == declared
    assert all(set(update.metrics) <= {"loss"} for update in updates)


def test_nothing_is_ever_nan(method: str, recipe_of: RecipeOf) -> None:
    recipe = recipe_of(method, data={**LONELY_CLASSES, "source": "digits"}, federation={"min_sites": 4, "quorum": 1.0})
    with simulation(recipe) as running:
        running.go()
        assert codec.first_not_finite(_state(running)) is None
        values = [
            v for by_site in running.ledger.scores(recipe.name).values() for s in by_site.values() for v in s.values()
        ]
    assert values
    assert np.isfinite(values).all()


LONELY_CLASSES = {"long_tail": 0.05, "partition": {"kind": "shards", "sites": 5, "shards": 2}}


def test_partial_participation_runs_to_the_end(method: str, recipe_of: RecipeOf) -> None:
    federation = {"min_sites": 3, "participation": 0.5, "quorum": 1.0}
    with simulation(recipe_of(method, federation=federation)) as running:
        running.go()
        rounds = running.ledger.rounds(running.recipe.name)
        cohorts = [
            {task.site for task in running.ledger.tasks(row.run, row.round) if task.kind == "fit"} for row in rounds
        ]
    assert [len(cohort) for cohort in cohorts[1:]] == [2, 2, 2]
    assert len({frozenset(cohort) for cohort in cohorts[1:]}) > 1


def _take_turns(agents: Sequence[Agent]) -> None:
    over: set[int] = set()
    for _ in range(2000):
        for number, agent in enumerate(agents):
            if number not in over and isinstance(agent.step(0.02), Finished):
                over.add(number)
        if len(over) == len(agents):
            return
    raise AssertionError("the run does not end")


def _published_rounds(running: Simulation) -> int:
    return sum(row.state is not None for row in running.ledger.rounds(running.recipe.name))


def _digest(running: Simulation) -> str:
    published = running.coordinator.published
    assert published is not None
    return published.address


def _state(running: Simulation) -> Payload:
    published = running.coordinator.published
    assert published is not None
    return published.state
