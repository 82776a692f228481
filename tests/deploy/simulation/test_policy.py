"""Simulations under a site's own policy: the same gate, the same bytes as over gRPC."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofed.client.policy.policy import Policy, Released
from protofed.client.policy.rules import PolicyRules
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part
from protofed.common.protocol.messages import Assignment, PauseReason, Receipt, Role, Task
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import EVALUATOR, build_agents, everything, simulation
from protofed.deploy.simulation.sites import DirectLink
from protofed.deploy.simulation.workers import Beginning
from protofed.testing.local_pool import LocalPool

RecipeOf = Callable[..., Recipe]
WITH_PROTOTYPES = ("fednh", "fedproc", "fedprp")


def careful(recipe: Recipe, **changes: Any) -> Policy:
    rules = {"min_samples_per_class": 3, "min_images_per_unit": 200, **changes}
    return Policy(PolicyRules.model_validate({**dict(everything(recipe).rules), **rules}))


def digest(running: Any) -> str:
    return str(running.run.published.address)


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, Released]]:
    """What simulated sites hand in: site, round, update."""
    seen: list[tuple[str, int, Released]] = []
    push = DirectLink.push

    def pushing(link: DirectLink, task: Task, released: Released) -> Receipt:
        seen.append((link.site, task.round, released))
        return push(link, task, released)

    monkeypatch.setattr(DirectLink, "push", pushing)
    return seen


@pytest.mark.parametrize("method", WITH_PROTOTYPES)
def test_rows_of_rare_classes_stay(method: str, recipe_of: RecipeOf, pushed: list[tuple[str, int, Released]]) -> None:
    recipe = recipe_of(method)
    with simulation(recipe, policy=careful(recipe)) as running:
        running.go()
        assert running.runs.failed == []
        held = {
            name: np.bincount(data.train.labels.numpy(), minlength=recipe.classes)
            for name, data in running.data.items()
        }
    assert any(((counts > 0) & (counts < 3)).any() for counts in held.values())  # there is something to keep
    fits = [(site, codec.decode(released.data)) for site, number, released in pushed if number]
    assert len(fits) == 3 * recipe.rounds
    for site, payload in fits:
        assert site != EVALUATOR
        assert sorted(map(int, payload[Part.PROTOTYPES])) == np.flatnonzero(held[site] >= 3).tolist()


@pytest.mark.parametrize("method", WITH_PROTOTYPES)
def test_grpc_gives_the_bytes_of_the_simulation_under_the_same_policy(
    method: str, recipe_of: RecipeOf, live_server: Callable[..., Any], linked: Callable[[str], Any], tmp_path: Path
) -> None:
    recipe = recipe_of(method, rounds=2)
    policy = careful(recipe)
    digests = set()
    for state in (None, tmp_path / "simulation"):
        with simulation(recipe, state, policy=policy) as running:
            running.go()
            digests.add(digest(running))
    server = live_server(recipe)
    agents = build_agents(recipe, linked(server.address), policy=policy)
    while not server.runs.finished:
        for agent in agents:
            agent.step(0.0)
    digests.add(server.runs.of(recipe.name).published.address)
    assert len(digests) == 1
    for wider in (everything(recipe), careful(recipe, min_images_per_unit=1)):  # both rules keep something back
        with simulation(recipe, policy=wider) as plain:
            plain.go()
            assert digest(plain) not in digests


def test_a_simulation_asks_nobody_and_has_neither_a_time_of_the_day_nor_a_secret(recipe_of: RecipeOf) -> None:
    recipe = recipe_of("fednh", rounds=1)
    never = {"days": ["mon"], "from": "00:00", "until": "00:01"}
    digests = set()
    for changes in ({}, {"approval": "manual"}, {"schedule": [never]}, {"batch_order": "secret"}):
        with simulation(recipe, policy=careful(recipe, **changes)) as running:
            running.go()
            digests.add(digest(running))
    assert len(digests) == 1


@pytest.mark.parametrize("method", sorted({*WITH_PROTOTYPES, "fedavg", "cwfedavg", "cwfedavg-private"}))
def test_sites_that_hide_their_classes_decline_a_run_that_sends_rows_by_class(
    method: str, recipe_of: RecipeOf, pushed: list[tuple[str, int, Released]]
) -> None:
    recipe = recipe_of(method, rounds=1, federation={"min_sites": 3, "quorum": 1.0, "max_attempts": 1})
    with simulation(recipe, policy=careful(recipe, hide_class_presence=True)) as running:
        running.go()
        (why,) = running.runs.failed
    assert "policy" in why
    assert {site for site, _, _ in pushed} <= {EVALUATOR}


@pytest.mark.parametrize("name", ["standard", "open"])  # under strict.toml each run waits for an approval
def test_digits_learn_under_every_shipped_policy(name: str) -> None:
    own = ["data.long_tail=0.1", f"federation.secure={str(name != 'open').lower()}"]
    recipe = shipped.recipe("digits-fednh", own)  # with a longer tail no row of a rare class would be sent
    recipe = recipe.model_copy(
        update={
            "rounds": 12,
            "plan": recipe.plan.model_copy(update={"epochs": 4}),  # `min_step_sum`: a site has 66 examples only
            "federation": recipe.federation.model_copy(update={"score_every": 0}),
        }
    )
    policy = Policy.read(shipped.folder("policies") / f"{name}.toml")
    with simulation(recipe, policy=policy) as running:
        running.go()
        assert running.runs.failed == []
        scores = running.ledger.scores(recipe.name)[recipe.rounds]
    assert scores[EVALUATOR]["global.accuracy"] > 0.6
    assert (scores.keys() == {EVALUATOR}) == (name != "open")


def test_a_server_takes_a_held_site_for_no_round(
    recipe_of: RecipeOf, live_server: Callable[..., Any], linked: Callable[[str], Any]
) -> None:
    recipe = recipe_of("fedavg", rounds=1)
    server = live_server(recipe)
    link, other = (linked(server.address)(name, frozenset({Role.TRAINER})) for name in ("site-1", "site-2"))
    other.enroll(PauseReason.NONE)  # two trainers make the first model
    for hold, there in ((PauseReason.APPROVAL, set()), (PauseReason.NONE, {"site-1"}), (PauseReason.SCHEDULE, set())):
        answer = link.enroll(hold)
        assert isinstance(answer, Assignment)
        assert server.runs._context.presence.enrolled(Role.TRAINER) == {"site-2"} | there
        assert server.runs._context.presence.pause_reason("site-1") is hold
        assert isinstance(link.next_task(answer.run, 0.0), Task) == bool(there)


def test_a_policy_holds_for_what_workers_load_and_compute(recipe_of: RecipeOf) -> None:
    started: list[frozenset[str]] = []

    class Spy(LocalPool):
        def start(self, worker: int, beginning: Beginning) -> None:
            started.append(beginning.plugins)
            super().start(worker, beginning)

    recipe = recipe_of("fedavg")
    for policy in (careful(recipe, plugins=["another"]), None):
        with simulation(recipe, policy=policy, pool=partial(Spy, 1)):
            pass
    assert started == [{"another"}, recipe.names]
    found = []
    for policy, pool in ((careful(recipe), None), (careful(recipe), partial(LocalPool, 2)), (None, None)):
        with simulation(recipe, policy=policy, pool=pool) as running:
            running.go()
            found.append((digest(running), running.ledger.scores(recipe.name)))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]  # it withholds something
