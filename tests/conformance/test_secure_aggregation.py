"""Every method with a linear form under simulated secure aggregation: it learns, repeats and can be verified."""

from __future__ import annotations

import dataclasses
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.method_facts import SUMMABLE, brief, long

from protofed.client.policy.policy import GateContext, Policy, Released
from protofed.client.state.disk_store import DiskStore
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Array, Part, Payload, Update, describe, distance_norm
from protofed.common.protocol.scores import Spread, spreads
from protofed.deploy.simulation.simulation import Simulation, simulation
from protofed.server.operator.verification import VerificationResult, verify_round
from protofed.testing.local_pool import LocalPool
from protofed.testing.small_recipe import OPTIONS, small_recipe

METHODS: list[dict[str, Any]] = [
    *({"name": name, **OPTIONS.get(name, {}), **brief(name)} for name in SUMMABLE),
    {"name": "fedproc", "weighting": "examples"},
    {"name": "cwfedavg", "shares": "true"},
    {"name": "cwfedavg", "shares": "true", "layers": "head"},
]
RULES = {"min_sites": 3, "quorum": 1.0, "heartbeat_s": 0.1}
SECURE = {**RULES, "secure": True}
PLAN = {"epochs": 1, "batch_size": 32, "lr": 0.01, "momentum": 0.9}  # FedPRP diverges at 0.05, and with it any last bit


def identity(method: dict[str, Any]) -> str:
    return " ".join(map(str, method.values()))


by_name = pytest.mark.parametrize("method", METHODS, ids=identity)


def recipe_of(method: dict[str, Any], **federation: object) -> Recipe:
    return small_recipe(method["name"], method=method, federation={**SECURE, **federation}, plan=PLAN)


def digest(running: Simulation) -> str:
    published = running.run.published
    assert published is not None
    return published.address


def numbers(payload: Payload) -> Array:
    """All floats of a state, which has the same tensors in both runs."""
    arrays = [array for _, tensors in sorted(payload.items()) for _, array in sorted(tensors.items())]
    return np.concatenate([array.reshape(-1).astype(np.float64) for array in arrays if array.dtype.kind == "f"])


@by_name
def test_it_learns_as_without_and_every_state_comes_out_again(method: dict[str, Any]) -> None:
    name, states, scores = method["name"], [], list[dict[str, Spread]]()
    for recipe in (recipe_of(method), small_recipe(name, method=method, federation=RULES, plan=PLAN)):
        with simulation(recipe) as running:
            running.go()
            rounds = [row for row in running.ledger.rounds(recipe.name) if row.state is not None]
            assert len(rounds) == recipe.rounds + 1
            for row in rounds[1:]:
                verified = verify_round(running.ledger, running.blobs, recipe.name, row.round, row.attempt)
                assert verified.finding is VerificationResult.SAME
            published = running.run.published
            assert published is not None
            states.append(published.state)
            single, sums = running.ledger.scores(recipe.name), running.ledger.score_sums(recipe.name)
            scores.append(spreads(single.get(recipe.rounds, {}), sums.get(recipe.rounds, {})))
    # But of class models, which without secure aggregation may be kept as the sites' own.
    if Part.CLASS_MODELS not in states[0] or describe(states[0]) == describe(states[1]):
        np.testing.assert_allclose(numbers(states[0]), numbers(states[1]), rtol=0, atol=1e-3)
    assert scores[0].keys() - {"loss"} == scores[1].keys()
    for score in scores[1]:
        assert scores[0][score].mean == pytest.approx(scores[1][score].mean, abs=0.02), score
        assert (scores[0][score].std is None) is (not score.startswith("global.") or ".local." in score), score


@pytest.mark.parametrize("method", long(METHODS, itemgetter("name")), ids=identity)
def test_neither_restarts_nor_order_nor_workers_change_a_bit(method: dict[str, Any], tmp_path: Path) -> None:
    recipe = recipe_of(method)
    with simulation(recipe, pool=partial(LocalPool, 2)) as running:
        dataclasses.replace(running, agents=list(reversed(running.agents))).go()
        expected = digest(running)
    for done in range(recipe.rounds):
        with simulation(recipe, tmp_path) as interrupted:
            interrupted.go(until=lambda running=interrupted, done=done: published_rounds(running) > done)  # type: ignore[misc]
            assert not interrupted.runs.finished
    with simulation(recipe, tmp_path) as resumed:
        resumed.go()
        assert digest(resumed) == expected


def published_rounds(running: Simulation) -> int:
    return sum(row.state is not None for row in running.ledger.rounds(running.recipe.name))


def test_a_simulated_site_keeps_in_its_folder_what_was_in_a_sum(tmp_path: Path) -> None:
    recipe = recipe_of({"name": "fedavg"}).model_copy(update={"rounds": 1})
    with simulation(recipe, tmp_path) as running:
        running.go()
    for site in ("site-1", "site-2", "site-3"):
        store = DiskStore(tmp_path / "sites" / site)
        assert store.newest_counted(recipe.name) == 1
        assert store.unsettled(recipe.name) == []
        store.close()


def test_a_site_scales_its_own_update_down_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[Update] = []
    release = Policy.release

    def recorded(policy: Policy, update: Update, context: GateContext | None = None) -> Released:
        released.append(update)
        return release(policy, update, context)

    monkeypatch.setattr(Policy, "release", recorded)
    recipe = recipe_of({"name": "fedavg"}, max_relative_norm=0.01)
    with simulation(recipe.model_copy(update={"rounds": 1})) as running:
        running.go()
        assert not running.runs.failed
    first, *updates = [update.payload for update in released if update.metrics or update is released[0]]
    assert len(updates) == 3
    for payload in updates:
        assert distance_norm(payload, first) == pytest.approx(0.01 * distance_norm(first, {}), rel=1e-4)
