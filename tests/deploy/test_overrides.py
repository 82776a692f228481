"""`--set` and `--dry-run`."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.deploy import shipped
from protofed.deploy.cli.main import app
from protofed.deploy.overrides import from_keywords


def test_assignments_go_over_the_recipe_with_the_types_of_toml() -> None:
    changed = shipped.recipe("digits-fednh", ["plan.lr=0.125", "rounds=2", "rounds=3", 'name="mine"'])
    assert (changed.plan.lr, changed.rounds, changed.name) == (0.125, 3, "mine")
    plain = shipped.recipe("digits-fednh")
    assert changed.method == plain.method
    assert changed.plan.epochs == plain.plan.epochs


def test_another_method_does_not_keep_the_options_of_the_first() -> None:
    assert shipped.recipe("digits-fednh", ['method.name="fedavg"']).method.options == {}


@pytest.mark.parametrize("assignment", ["plan.lrr=0.1", "plan.lr=fast", "plan.lr", 'plan.lr="fast"', "rounds=0"])
def test_what_a_recipe_cannot_have_is_refused(assignment: str) -> None:
    with pytest.raises(ConfigError):
        shipped.recipe("digits-fednh", [assignment])


def test_keywords_nest_by_underscores_dots_and_dicts() -> None:
    given = {"plan__lr": 0.1, "plan.epochs": 2, "evaluation": {"every": 3}, "rounds": 4}
    assert from_keywords(given) == {"plan": {"lr": 0.1, "epochs": 2}, "evaluation": {"every": 3}, "rounds": 4}


def test_a_dry_run_prints_the_recipe_that_would_run_and_makes_nothing(tmp_path: Path) -> None:
    state = tmp_path / "state"
    called = ["simulate", "digits-fednh", "--dry-run", "--set", "plan.lr=0.125", "--state", str(state)]
    found = CliRunner().invoke(app, called)
    assert found.exit_code == 0
    assert Recipe.model_validate(tomllib.loads(found.stdout)) == shipped.recipe("digits-fednh", ["plan.lr=0.125"])
    assert not state.exists()


def test_a_dry_run_of_a_comparison_has_every_recipe_with_every_seed(tmp_path: Path) -> None:
    called = ["compare", "digits-fednh", "digits-fedavg", "--dry-run", "--seeds", "0,1", "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(app, called)
    assert found.exit_code == 0
    assert found.stdout.count("\nrounds = ") == 4
    assert not (tmp_path / "out").exists()
