"""Sites that are held out: they take no part, and begin with the run's last model when it has ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from protofed.client.data.site import load_sites
from protofed.client.method import client_methods
from protofed.client.models.catalogue import device_model
from protofed.client.policy.policy import Policy
from protofed.client.training.context import FitContext, seeded
from protofed.client.training.evaluation import compute_scores, of_personal
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import Part, Payload
from protofed.deploy.cli.options import show_dry_run
from protofed.deploy.experiments.experiment import ExperimentJob
from protofed.deploy.experiments.job import run_job
from protofed.deploy.experiments.summary import summarise, usual
from protofed.deploy.simulation.run_tables import simulate_with_progress
from protofed.deploy.simulation.simulation import Simulation, everything, held_out_scores, simulation
from protofed.server.rounds.context import build_method
from protofed.testing.local_pool import LocalPool

RecipeOf = Callable[..., Recipe]
CPU = torch.device("cpu")


def of_six(recipe_of: RecipeOf, method: str = "fedavg", held_out: int = 2, **changes: Any) -> Recipe:
    """Four of six sites take part."""
    data = {"source": "digits", "partition": {"kind": "dirichlet", "sites": 6, "beta": 0.5}}
    federation = {"min_sites": 6 - held_out, "quorum": 1.0}
    return recipe_of(method, data={**data, "held_out_sites": held_out}, federation=federation, **changes)


def last_state(running: Simulation) -> Payload:
    addresses = [row.state for row in running.ledger.rounds(running.recipe.name) if row.state is not None]
    return codec.decode(running.blobs.get(addresses[-1]))


def test_a_run_is_the_same_as_if_its_held_out_sites_had_never_been(recipe_of: RecipeOf) -> None:
    recipe = of_six(recipe_of)
    assert recipe.data is not None
    with simulation(recipe) as running:
        running.go()
        state, scores = codec.encode(last_state(running)), running.ledger.scores(recipe.name)
        assert list(running.data) == ["site-1", "site-2", "site-3", "site-4"]
        assert sorted(held_out_scores(running)) == ["site-5", "site-6"]
    without = recipe.model_copy(update={"data": recipe.data.model_copy(update={"held_out_sites": 0})})
    sites = load_sites(recipe.data, recipe.input, recipe.classes)
    assert len(sites) == 6
    with simulation(without, sites=sites[:4]) as alone:
        alone.go()
        assert codec.encode(last_state(alone)) == state
        assert alone.ledger.scores(recipe.name) == scores
        assert held_out_scores(alone) == {}


def context_of_site_6(recipe: Recipe) -> FitContext:
    """A site that begins with nothing, in the last round."""
    assert recipe.data is not None
    return FitContext(
        site="site-6",
        round=recipe.rounds,
        rounds=recipe.rounds,
        model=device_model(recipe, CPU, recipe.names),
        data=load_sites(recipe.data, recipe.input, recipe.classes)[5],
        classes=recipe.classes,
        plan=recipe.plan,
        rng=seeded(recipe.seed, recipe.rounds, "site-6", CPU),
        client_state={},
    )


def test_its_model_is_that_of_one_round_of_training_from_the_last_state(recipe_of: RecipeOf) -> None:
    recipe = of_six(recipe_of, plan={"epochs": 1, "batch_size": 32, "lr": 0.05, "lr_decay": 0.5})
    with simulation(recipe) as running:
        running.go()
        scores, state = held_out_scores(running)["site-6"], last_state(running)
    local = context_of_site_6(recipe)
    client_methods.build("fedavg", {}).fit(local, state)
    assert compute_scores(of_personal(local.model, local.data, recipe), local.data, recipe) == scores


def test_with_cwfedavg_it_is_the_mixture_by_the_shares_that_its_training_gave(recipe_of: RecipeOf) -> None:
    """Before it has sent any, the server knows only the mixture of all classes alike, which is of no site."""
    recipe = of_six(recipe_of, "cwfedavg")
    with simulation(recipe) as running:
        running.go()
        scores, state = held_out_scores(running)["site-6"], last_state(running)
    local = context_of_site_6(recipe)
    client, server = client_methods.build("cwfedavg", {}), build_method(recipe)
    assert "site-6" not in state[Part.CLASS_SHARES]
    update = client.fit(local, server.broadcast(state, "site-6"))
    shares = {**state[Part.CLASS_SHARES], "site-6": update.payload[Part.CLASS_SHARES]["shares"].astype(float)}
    for known, same in ((state, False), ({**state, Part.CLASS_SHARES: shares}, True)):
        client.load_global(local, server.broadcast(known, "site-6"))
        assert (compute_scores(of_personal(local.model, local.data, recipe), local.data, recipe) == scores) is same


def test_workers_and_a_restart_change_nothing(recipe_of: RecipeOf, tmp_path: Path) -> None:
    recipe = of_six(recipe_of, "fednh")
    with simulation(recipe) as alone, simulation(recipe, pool=partial(LocalPool, 2)) as spread:
        alone.go()
        spread.go()
        expected = held_out_scores(alone)
        assert held_out_scores(spread) == expected
        assert "site-6" not in {site for of in spread.training.by_round().values() for site in of}
    with simulation(recipe, tmp_path) as ended:
        ended.go()
    with simulation(recipe, tmp_path) as opened:
        assert held_out_scores(opened) == expected


def test_what_a_policy_keeps_or_refuses_is_not_shown(recipe_of: RecipeOf, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = of_six(recipe_of)
    rules = everything(recipe).rules.model_copy(update={"metrics": frozenset({"loss", "personal.pm_v"})})
    with simulation(recipe, policy=Policy(rules)) as running:
        running.go()
        assert {name for own in held_out_scores(running).values() for name in own} == {"personal.pm_v"}
    with simulation(recipe) as running:
        running.go()
        capsys.readouterr()
        refusing = running.held_out[0]
        refusing.policy = Policy(refusing.policy.rules.model_copy(update={"methods": frozenset({"fednh"})}))
        assert sorted(held_out_scores(running)) == ["site-6"]
    assert "a held-out site cannot take part in the run" in capsys.readouterr().out


@pytest.mark.parametrize("held_out", [6, 9])
def test_some_sites_must_take_part(recipe_of: RecipeOf, held_out: int) -> None:
    recipe = of_six(recipe_of, held_out=2)
    assert recipe.data is not None
    data = recipe.data.model_copy(update={"held_out_sites": held_out})
    with (
        pytest.raises(ConfigError, match=f"held_out_sites = {held_out} of 6 sites"),
        simulation(recipe.model_copy(update={"data": data})),
    ):
        pass


def test_compare_has_columns_of_them_and_simulate_a_line(
    recipe_of: RecipeOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = of_six(recipe_of, rounds=1)
    job = ExperimentJob(recipe, tmp_path / "job")
    job.claim()
    run_job(job, CPU, lambda _done, _doing: None)
    result = job.result()
    assert result is not None
    assert sorted(result.held_out) == ["site-5", "site-6"]
    columns = {column.header: column.read(summarise(result)) for column in usual([summarise(result)])}
    mean = sum(own["personal.pm_v"] for own in result.held_out.values()) / 2
    assert columns["held-out PM(V)"] == pytest.approx(mean)
    assert "held-out local" not in columns  # no site has a local test
    capsys.readouterr()
    shown = simulate_with_progress(recipe, None, "cpu")
    assert json.loads(json.dumps(shown.held_out)) == result.held_out
    assert f"2 held-out sites, after one round of their own training: PM(V) {100 * mean:.1f}" in capsys.readouterr().out
    show_dry_run([recipe], simulated=True)
    assert (
        "sites: 6 and an evaluator, of digits data, partition dirichlet, the last 2 held out" in capsys.readouterr().out
    )
