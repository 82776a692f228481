"""Masked rounds of real agents and the real server give the state of a simulation, bit for bit."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.common.secure_aggregation.test_masking import uniformity

from protofed.client.agent import scores
from protofed.client.agent.computation import Computation, fit
from protofed.client.secure_aggregation.partners import open_membership
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.store import FitOutcome, MemoryStore
from protofed.client.tasks.classification import ClassificationTask
from protofed.client.training.dp import SIMULATED_SECRET
from protofed.common import plugins
from protofed.common.config.recipe import Recipe
from protofed.common.errors import FailureReason, TaskFailedError
from protofed.common.payload import Array, Part, Payload, SiteId
from protofed.common.protocol.messages import TaskKind
from protofed.common.protocol.scores import Spread
from protofed.common.secure_aggregation.messages import SignatureMessage, unpack
from protofed.deploy.simulation.simulation import EVALUATOR, Simulation, build_agents, everything, load_data, simulation
from protofed.deploy.simulation.sites import DirectLink
from protofed.server.operator.verification import VerificationResult, verify_round
from protofed.server.rounds.context import open_server
from protofed.server.rounds.queue import RunQueue
from protofed.testing.small_recipe import OPTIONS, small_recipe

METHODS: list[dict[str, Any]] = [{"name": "fedavg"}, {"name": "fednh", **OPTIONS["fednh"]}]


RULES: dict[str, Any] = {"min_sites": 3, "quorum": 1.0, "heartbeat_s": 0.1, "secure": True, "score_every": 1}


def masked(recipe: Recipe, folder: Path, resources: ExitStack) -> Simulation:
    """The agents of a simulation and a server, which sum under masks."""
    opened = open_server(None, resources, simulated=True)
    context = replace(opened, simulated=False, clock=time.monotonic)
    runs, data = RunQueue([recipe], context), load_data(recipe)
    agents = build_agents(recipe, lambda name, roles: DirectLink(runs, context.blobs, name, roles), data=data)
    for agent in agents:
        agent._site.simulated = agent.name == EVALUATOR
        agent._work.sums.membership = open_membership(folder / agent.name, agent.name, lambda: None)
    return Simulation(recipe, runs, context.ledger, context.blobs, data, agents)


def kinds(running: Simulation) -> set[str]:
    return {task.kind for task in running.ledger.tasks(running.recipe.name)}


def states(running: Simulation) -> list[str | None]:
    """What each round published."""
    running.go()
    rows = running.ledger.rounds(running.recipe.name)
    for row in rows[1:]:
        verified = verify_round(running.ledger, running.blobs, running.recipe.name, row.round, row.attempt)
        assert verified.finding is VerificationResult.SAME
    return [row.state for row in rows]


@pytest.fixture(autouse=True)
def all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of any model leave, on all images, as in a simulation: test sets of these sites have a few images."""
    monkeypatch.setattr(ClassificationTask, "is_nearly_constant", lambda *_: False)
    monkeypatch.setattr(scores, "secret_half", lambda _, images: torch.ones(images, dtype=torch.bool))
    monkeypatch.setattr(scores, "MIN_IMAGES", 0)
    monkeypatch.setattr(ClassificationTask, "can_be_asked", lambda *_: True)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method["name"]))
def test_masked_rounds_give_the_state_and_the_scores_of_a_simulation(method: dict[str, Any], tmp_path: Path) -> None:
    recipe = small_recipe(method["name"], method=method, federation=RULES, rounds=2)
    plugins.allow(everything(recipe).rules.plugins)
    with simulation(recipe) as plain:
        expected, simulated = states(plain), scored(plain)
    with ExitStack() as resources:
        running = masked(recipe, tmp_path, resources)
        assert states(running) == expected
        assert scored(running) == simulated
        assert "mask" in kinds(running)
        rows = running.ledger.updates(recipe.name, recipe.rounds)
        sent = [running.blobs.get(row.digest) for row in rows if row.task.kind is TaskKind.MASK]
        published = running.run.published
    assert len(sent) >= recipe.federation.min_sites
    assert all(uniformity(vector_of(blob)) > 1e-6 for blob in sent), "what leaves a site tells nothing"
    assert published is not None
    assert uniformity(words_of(published.state, recipe)) < 1e-6, "what sites send without masks would be told from that"
    single, sums = simulated
    assert {site for of_round in single.values() for site in of_round} == {EVALUATOR}
    assert sums[2]["personal.balanced_accuracy"].sites == 3
    assert sums[2]["loss"].sites == 3
    assert all(spread.sites == 3 and spread.worst is None for spread in sums[2].values())


def test_shared_noise_is_the_same_under_masks_and_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the last bits: a simulated site adds it to float32, a daemon on the ring."""
    monkeypatch.setattr(DiskStore, "secret", lambda _: SIMULATED_SECRET)
    monkeypatch.setattr(MemoryStore, "secret", lambda _: SIMULATED_SECRET)
    final = []
    for shared_by, std in ((3, 5.0), (3, 1e-3)):
        dp = {"noise_multiplier": std, "sampling_rate": 0.5, "shared_by": shared_by}
        plan = {"batch_size": 64, "lr": 0.2, "dp": dp}
        recipe = small_recipe("fedavg", federation=RULES, rounds=1, plan=plan)
        plugins.allow(everything(recipe).rules.plugins)
        with simulation(recipe) as plain:
            states(plain)
            expected = weights(plain)
        with ExitStack() as resources:
            running = masked(recipe, tmp_path / str(std), resources)
            states(running)
            found = weights(running)
            assert "mask" in kinds(running)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        final.append(found)
    noisy, quiet = final
    # The mean of three sites, each with a share of lr C sigma / (B sqrt(3)).
    assert np.std(noisy - quiet) == pytest.approx(0.2 * 5.0 / 64 / 3, rel=0.05)


def weights(running: Simulation) -> Array:
    published = running.run.published
    assert published is not None
    tensors = [*published.state[Part.BODY].values(), *published.state[Part.HEAD].values()]
    return np.concatenate([tensor.ravel() for tensor in tensors])


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method["name"]))
def test_a_simulation_leaves_out_the_groups_that_masked_rounds_leave_out(
    method: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of seven sites fails in round 2: both leave out its group and sum the other; its sites keep their models."""
    data = {"source": "digits", "partition": {"kind": "dirichlet", "sites": 7, "beta": 5.0}}
    rules = {**RULES, "quorum": 3}
    recipe = small_recipe(method["name"], method=method, federation=rules, rounds=3, data=data)
    plugins.allow(everything(recipe).rules.plugins)

    def fails(work: Computation, *rest: Any) -> FitOutcome:
        if (work.site, work.task.round) == ("site-1", 2):
            raise TaskFailedError(FailureReason.NUMERIC, "not this time")
        return fit(work, *rest)

    monkeypatch.setattr("protofed.client.agent.run_work.fit", fails)
    with simulation(recipe) as plain:
        expected, groups = states(plain), plain.ledger.groups()
        aside, simulated = rejected(plain), scored(plain)
    first, second = groups
    assert {len(first), len(second)} == {3, 4}
    broken = {*(first if "site-1" in first else second)}
    assert aside == broken - {"site-1"}
    assert len(expected) == len(set(expected)) == 4
    with ExitStack() as resources:
        running = masked(recipe, tmp_path, resources)
        assert states(running) == expected
        assert running.ledger.groups() == groups
        assert rejected(running) <= aside  # who comes when nothing is waited for any more is late
        assert scored(running) == simulated
        assert "mask" in kinds(running)


def rejected(running: Simulation) -> set[SiteId]:
    rows = running.ledger.updates(running.recipe.name)
    return {row.task.site for row in rows if row.rejected is not None and row.task.round == 2}


def vector_of(blob: bytes) -> Array:
    _, vector = unpack(blob, SignatureMessage)
    assert vector is not None
    return vector


def words_of(state: Payload, recipe: Recipe) -> Array:
    fixed_point = recipe.federation.fixed_point
    assert fixed_point is not None
    return fixed_point.encoded(np.concatenate([tensor.ravel() for tensor in state[Part.BODY].values()]))


def scored(running: Simulation) -> tuple[dict[int, dict[str, dict[str, float]]], dict[int, dict[str, Spread]]]:
    run = running.recipe.name
    return running.ledger.scores(run), running.ledger.score_sums(run)
