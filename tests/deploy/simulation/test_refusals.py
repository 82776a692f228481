"""A simulation that cannot go on says what it waits for, and what was refused; never what is not so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Mount

from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import PolicyRules
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, OutOfSpaceError, StateError
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import everything, simulation
from protofed.server.rounds.machine.waiting import Waiting, WaitReason
from protofed.server.rounds.run import Run

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


def test_with_too_few_sites_the_keys_that_ask_for_more_are_named(recipe_of: RecipeOf) -> None:
    recipe = recipe_of("fedavg", federation={"min_sites": 4, "quorum": 3})
    error, failed, refused = told(recipe)
    for phrase in ("round 1 needs 4 trainers, has 3", "min_sites is 4", "quorum 3"):
        assert phrase in error
    assert (failed, refused) == ([], "")


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


def test_a_site_that_is_required_and_not_there_is_named(recipe_of: RecipeOf) -> None:
    rules = federation(recipe_of("fedavg"), required_sites=["hospital"])
    error, _, _ = told(recipe_of("fedavg", federation=rules))
    assert "hospital" in error
    assert "min_sites" not in error


def test_the_reason_of_a_refused_update_is_told(recipe_of: RecipeOf) -> None:
    recipe = recipe_of("fedavg")
    rules = federation(recipe, max_relative_norm=1e-6, max_attempts=1)
    _, failed, refused = told(recipe_of("fedavg", federation=rules))
    assert len(failed) == 1
    assert "the server, of site-" in refused
    assert "this run accepts at most" in refused


def test_what_a_sites_policy_refuses_is_told(recipe_of: RecipeOf) -> None:
    data = {"source": "digits", "partition": {"kind": "dirichlet", "sites": 5, "beta": 5.0}}
    recipe = recipe_of("fednh", data=data)
    rules = PolicyRules.model_validate({**dict(everything(recipe).rules), "parts": frozenset({"body"})})
    _, failed, refused = told(recipe, Policy(rules))
    assert len(failed) == 1
    assert "the policy of site-1, site-2, site-3 and 1 more: " in refused  # the fifth was not asked any more
