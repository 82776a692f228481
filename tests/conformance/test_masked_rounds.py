"""Masked rounds of real agents and the real server give the state of a simulation, bit for bit."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.common.secure_sums.test_secure_sums import uniformity

from protofed.client.sums.membership import membership_of
from protofed.common import plugins
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Array, Part, Payload
from protofed.common.protocol.messages import TaskKind
from protofed.common.protocol.sum_messages import SignatureMessage, message_of
from protofed.deploy.simulation.direct_link import DirectLink
from protofed.deploy.simulation.simulation import EVALUATOR, Simulation, agents_of, data_of, everything, simulation
from protofed.server.assembly import open_server
from protofed.server.rounds.run_queue import RunQueue
from protofed.testing.small_recipe import OPTIONS, small_recipe

METHODS: list[dict[str, Any]] = [{"name": "fedavg"}, {"name": "fednh", **OPTIONS["fednh"]}]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method["name"]))
def test_masked_rounds_give_the_state_of_a_simulation(method: dict[str, Any], tmp_path: Path) -> None:
    rules = {"min_sites": 3, "quorum": 1.0, "heartbeat_s": 0.1, "secure": True, "score_every": 0}
    recipe = small_recipe(method["name"], method=method, federation=rules, rounds=2)
    plugins.allow(everything(recipe).rules.plugins)
    with simulation(recipe) as plain:
        plain.go()
        expected = plain.coordinator.published
    with ExitStack() as resources:
        opened = open_server(None, resources, simulated=True)
        context = replace(opened, simulated=False, clock=time.monotonic)
        runs, data = RunQueue([recipe], context), data_of(recipe)
        agents = agents_of(recipe, lambda name, roles: DirectLink(runs, context.blobs, name, roles), data=data)
        for agent in agents:
            agent._site.simulated = agent.name == EVALUATOR
            agent._site.membership = membership_of(tmp_path / agent.name, lambda: None)
        running = Simulation(recipe, runs, context.ledger, context.blobs, data, agents)
        running.go()
        found = running.coordinator.published
        kinds = {task.kind for task in context.ledger.tasks(recipe.name)}
        rows = context.ledger.updates(recipe.name, recipe.rounds)
        sent = [context.blobs.get(row.digest) for row in rows if row.task.kind is TaskKind.MASK]
    assert "mask" in kinds
    assert len(sent) >= recipe.federation.min_sites
    assert all(uniformity(vector_of(blob)) > 1e-6 for blob in sent), "what leaves a site tells nothing"
    assert expected is not None
    assert uniformity(words_of(expected.state, recipe)) < 1e-6, "what sites send without masks would be told from that"
    assert found is not None
    assert found.address == expected.address


def vector_of(blob: bytes) -> Array:
    _, vector = message_of(blob, SignatureMessage)
    assert vector is not None
    return vector


def words_of(state: Payload, recipe: Recipe) -> Array:
    fixed_point = recipe.federation.fixed_point
    assert fixed_point is not None
    return fixed_point.encoded(np.concatenate([tensor.ravel() for tensor in state[Part.BODY].values()]))
