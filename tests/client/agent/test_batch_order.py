"""Which examples make which step: drawn from the site's secret or, where the policy says so, the recipe's seed."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.support.scripted_server import RULES, AgentHarness, give_secret

from protofed.client.site import DaemonStatus, prepare
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.store import SiteState
from protofed.client.training.context import FitContext, NoCheckpoints, seeded
from protofed.common.errors import FailureReason
from protofed.common.protocol.messages import Assignment

SECRET, RECIPE = "secret", "recipe"


def context(folder: Path, order: str, round: int = 1, run: str = "run", name: str = "ann") -> FitContext:
    harness = AgentHarness(store=DiskStore(folder), rules={**RULES, "batch_order": order}, name=name)
    site = harness.agent()._site
    assert isinstance(site.store, DiskStore)
    try:
        prepared = prepare(site, Assignment(run, harness.link.recipe))
        return prepared.fit_context(site.name, harness.fit(round), SiteState(), DaemonStatus(), NoCheckpoints())
    finally:
        site.store.close()


def batches(local: FitContext) -> list[int]:
    """Labels and pixels of all batches of an epoch, as one number for each example."""
    return [hash(tuple(image.flatten().tolist())) for images, _ in local.data.batches(4, local.rng) for image in images]


def test_of_a_secret_only_its_site_knows_the_order(tmp_path: Path) -> None:
    for name in ("a", "b"):
        give_secret(tmp_path / name, name.encode())
    one, other = (context(tmp_path / name, SECRET) for name in ("a", "b"))
    public = seeded(0, 1, "ann", torch.device("cpu"))  # what the server knows: recipe, round and name
    assert len({one.rng.initial_seed(), other.rng.initial_seed(), public.initial_seed()}) == 3
    assert batches(one) != batches(other)
    seeds = [context(tmp_path / "a", SECRET, **at).rng.initial_seed() for at in ({}, {"round": 2}, {"run": "other"})]
    assert len(set(seeds)) == 3
    assert seeds[0] == context(tmp_path / "a", SECRET).rng.initial_seed()  # it survives the daemon


def test_dropout_follows_it_too_and_of_the_recipe_it_is_that_of_a_simulation(tmp_path: Path) -> None:
    drawn = []
    for name in ("a", "b", "a"):
        give_secret(tmp_path / name, name.encode())
        context(tmp_path / name, SECRET)
        drawn.append(torch.rand(3).tolist())  # of the default generator
    assert drawn[0] == drawn[2] != drawn[1]
    for name in ("a", "b"):
        give_secret(tmp_path / name, name.encode())
        local = context(tmp_path / name, RECIPE)
        assert local.rng.initial_seed() == seeded(0, 1, "ann", torch.device("cpu")).initial_seed()


def test_what_is_prepared_does_not_print_its_seed_and_without_its_secret_a_site_trains_nothing(tmp_path: Path) -> None:
    give_secret(tmp_path)
    harness = AgentHarness(store=DiskStore(tmp_path), rules={**RULES, "batch_order": SECRET})
    prepared = prepare(harness.agent()._site, Assignment("run", harness.link.recipe))
    assert str(prepared.seed) not in repr(prepared)
    (tmp_path / ".secret").write_bytes(b"short")
    harness.restart(tmp_path)
    task = harness.fit(1)
    harness.agent().step(0.0)
    assert harness.declined() == [(task.task_id, FailureReason.DISK)]
