"""A whole run over gRPC under the standard policy: the sites' own scores stay there, and can be read there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.command_line import called
from tests.support.policies import standard_with_plain_updates

from protofed.client.agent.agent import Agent
from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import is_own
from protofed.client.state.disk_store import DiskStore
from protofed.common.config.recipe import Recipe
from protofed.deploy.simulation.simulation import EVALUATOR, build_agents
from protofed.server.monitoring.collector import CollectorSources, StateCollector
from protofed.server.operator.run_record import run_record
from protofed.server.storage.reader import LedgerReader

OWN = {
    "loss",
    "personal.pm_v",
    "personal.pm_l",
    "personal.accuracy",
    "personal.local.accuracy",
    "global.local.accuracy",
}


@pytest.fixture
def recipe(recipe_of: Callable[..., Recipe]) -> Recipe:
    data = {"source": "digits", "local_test_fraction": 0.2, "partition": {"kind": "dirichlet", "sites": 3, "beta": 0.5}}
    # No test waits for so long: a scoring that waits for scores that never come fails by its time.
    return recipe_of(
        "fednh",
        rounds=2,
        data=data,
        federation={"min_sites": 3, "quorum": 1.0, "heartbeat_s": 0.1, "score_deadline_s": 100_000.0},
    )


def test_own_scores_stay_at_the_site_and_are_shown_there(
    recipe: Recipe,
    live_server: Callable[..., Any],
    linked: Callable[[str], Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    server, stores = live_server(recipe), dict[str, DiskStore]()

    def store(name: str) -> DiskStore:
        return stores.setdefault(name, DiskStore(tmp_path / name))

    agents = build_agents(
        recipe, linked(server.address), store, policy=Policy.read(standard_with_plain_updates(tmp_path / "policies"))
    )
    work(server, agents)
    assert server.runs.failed == []

    assert_the_server_has_none(server, recipe, tmp_path)
    for site in ("site-1", "site-2", "site-3"):
        assert_the_site_has_them(tmp_path / site, recipe, capfd)
    assert not (tmp_path / EVALUATOR / ".scores").exists()
    for opened in stores.values():
        opened.close()


def work(server: Any, agents: list[Agent]) -> None:
    steps = 0
    while not server.runs.finished:
        assert (steps := steps + 1) < 1000, "the run does not end"
        for agent in agents:
            agent.step(0.0)


def assert_the_server_has_none(server: Any, recipe: Recipe, folder: Path) -> None:
    scores = server.ledger.scores(recipe.name)
    assert scores.keys() == {1, 2}
    assert all(by_site.keys() == {EVALUATOR} for by_site in scores.values())
    updates = server.ledger.updates(recipe.name, range(3))
    assert updates
    assert all(not update.metrics for update in updates)
    record = run_record(server.ledger, server.blobs, recipe.name)
    assert not any(is_own(name) for number in record["scores"] for own in number["sites"].values() for name in own)
    assert record["classes"]["judged_by"] == "global.balanced_accuracy"

    records = LedgerReader(f"sqlite:///{folder / 'server' / 'ledger.sqlite'}")
    context = server.context
    sources = CollectorSources(
        server.runs, context.presence, records, server.operation.certificates, None, folder, lambda: None
    )
    families = list(StateCollector(sources).collect())
    records.close()
    scopes = {s.labels["scope"] for f in families for s in f.samples if s.name == "protofed_score"}
    assert scopes == {"global"}


def assert_the_site_has_them(state: Path, recipe: Recipe, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capfd, "client", "runs", recipe.name, "--state", state, "--json")
    assert code == 0
    rounds = json.loads(out)["rounds"]
    assert [scored["round"] for scored in rounds] == [1, 2]
    for scored in rounds:
        assert scored["scores"].keys() >= OWN
        assert all(is_own(name) for name in scored["scores"])
        assert 0 <= scored["scores"]["personal.pm_l"] <= 1
