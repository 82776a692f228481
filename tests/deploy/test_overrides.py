"""`--set` and `--dry-run`."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from protofed.common.config.recipe import Recipe
from protofed.common.config.settings import ServerSettings, read_settings
from protofed.common.errors import ConfigError, ProtofedError
from protofed.deploy import shipped
from protofed.deploy.cli.main import app
from protofed.deploy.daemons.server import recipes_of
from protofed.deploy.shipped import from_keywords
from protofed.deploy.site.plan import site_plan


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


def test_an_assignment_of_nothing_removes_a_key() -> None:
    assert shipped.recipe("digits-fednh-dp").plan.dp is not None
    assert shipped.recipe("digits-fednh-dp", ["plan.dp="]).plan.dp is None
    default = type(shipped.recipe("digits-fednh").plan).model_fields["lr"].default
    assert shipped.recipe("digits-fednh", ["plan.lr=0.5", "plan.lr ="]).plan.lr == default
    assert shipped.recipe("digits-fednh", ["plan.lr=", "plan.lr=0.5"]).plan.lr == 0.5


@pytest.mark.parametrize(
    ("assignment", "said"),
    [("plan.dpp=", "did you mean 'plan.dp'"), ("rounds=", "'rounds' is missing"), ("plan.lr", "KEY= removes the key")],
)
def test_a_key_that_cannot_be_removed_is_named(assignment: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shipped.recipe("digits-fednh", [assignment])


def test_keywords_nest_by_underscores_dots_and_dicts() -> None:
    given = {"plan__lr": 0.1, "plan.epochs": 2, "evaluation": {"every": 3}, "rounds": 4}
    assert from_keywords(given) == {"plan": {"lr": 0.1, "epochs": 2}, "evaluation": {"every": 3}, "rounds": 4}


RECIPE = shipped.folder("recipes") / "digits-fednh.toml"


def dry(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in (*words, "--dry-run")])


def folder_of(words: tuple[object, ...], tmp_path: Path) -> list[object]:
    """The words with `STATE` in the folder of the test."""
    return [tmp_path / "state" if word == "STATE" else word for word in words]


READERS: dict[str, tuple[object, ...]] = {
    "simulate": ("simulate", RECIPE, "--state", "STATE"),
    "server": ("server", "start", "--recipe", RECIPE, "--plaintext", "--state", "STATE"),
    "runs": ("runs", "start", RECIPE, "--plaintext", "--server", "127.0.0.1:9"),
}


@pytest.mark.parametrize("words", READERS.values(), ids=READERS)
def test_a_dry_run_prints_the_changed_recipe_and_what_leaves_a_site_and_makes_nothing(
    words: tuple[object, ...], tmp_path: Path
) -> None:
    found = dry(*folder_of(words, tmp_path), "--set", "plan.lr=0.125")
    assert found.exit_code == 0
    assert Recipe.model_validate(tomllib.loads(found.stdout)) == shipped.recipe("digits-fednh", ["plan.lr=0.125"])
    (sent,) = [line for line in found.stdout.splitlines() if line.startswith("# leaves a site each round: ")]
    plan = site_plan(shipped.recipe("digits-fednh"))
    assert {part.strip() for part in sent.split(": ")[1].split(";")[0].split(",")} == {
        tensor.spec.part.value for tensor in plan.outgoing
    }
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_leaves_in_a_secure_sum_alone() -> None:
    recipe = shipped.recipe("digits-fednh-secure")
    lines = dry("simulate", "digits-fednh-secure").stdout.splitlines()
    plan = site_plan(recipe)
    assert any(line.endswith(f"as one masked vector, {plan.sent_bytes[1]:,} bytes") for line in lines)
    own = [line for line in lines if ": personal." in line or line.endswith(": loss")]
    assert len(own) > 1
    assert all(line.startswith("# leaves a site in a secure sum alone, ") for line in own)


@pytest.mark.parametrize("words", READERS.values(), ids=READERS)
def test_a_dry_run_refuses_what_a_method_does_not_know(words: tuple[object, ...], tmp_path: Path) -> None:
    found = dry(*folder_of(words, tmp_path), "--set", "method.momentun=0.5")
    assert isinstance(found.exception, ConfigError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", READERS.values(), ids=READERS)
def test_a_dry_run_refuses_what_the_start_of_every_run_refuses(words: tuple[object, ...], tmp_path: Path) -> None:
    sets = ("--set", 'method.name="solo"', "--set", 'federation.robust="median"')
    found = dry(*folder_of(words, tmp_path), *sets)
    assert isinstance(found.exception, ConfigError)
    assert "no mean of the sites' updates" in str(found.exception)
    assert found.stdout == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "federation.min_sites=50"), "50 trainers are needed"),
        (("--set", "data.partition.min_examples=9999"), "examples"),
        (("--policy", "standard"), "no site takes part"),
        (("--device", "cuda:99"), "cuda"),
    ],
)
def test_a_dry_run_of_a_simulation_looks_at_sites_data_policy_and_device(words: tuple[str, ...], said: str) -> None:
    found = dry("simulate", RECIPE, *words)
    assert isinstance(found.exception, ProtofedError)
    assert said in str(found.exception)


def test_a_dry_run_of_a_server_needs_what_its_start_needs(tmp_path: Path) -> None:
    found = dry("server", "start", "--recipe", RECIPE, "--identity", tmp_path / "none")
    assert isinstance(found.exception, ConfigError)
    assert str(tmp_path / "none") in str(found.exception)


def test_only_a_simulation_needs_data_in_its_recipe(tmp_path: Path) -> None:
    text = RECIPE.read_text(encoding="utf-8").partition("[data]")[0]
    (tmp_path / "no-data.toml").write_text(text, encoding="utf-8")
    assert isinstance(dry("simulate", tmp_path / "no-data.toml").exception, ConfigError)
    assert dry("runs", "start", tmp_path / "no-data.toml", "--plaintext").exit_code == 0


def test_a_dry_run_without_pytorch_still_has_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "protofed.deploy.site.plan", None)
    found = dry("runs", "start", RECIPE, "--plaintext")
    assert Recipe.model_validate(tomllib.loads(found.stdout)) == shipped.recipe("digits-fednh")


NO_RECIPE: dict[str, tuple[str, ...]] = {
    "server": ("server", "start", "--plaintext", "--state", "STATE"),
    "figures": ("figures", "STATE"),
    "export": ("export", "run", "--model", "global", "--out", "STATE"),
    "check": ("client", "check"),
}


@pytest.mark.parametrize("words", NO_RECIPE.values(), ids=NO_RECIPE)
def test_set_without_a_recipe_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    called = [str(word) for word in folder_of(words, tmp_path)]
    found = CliRunner().invoke(app, [*called, "--set", "rounds=2"])
    assert isinstance(found.exception, ConfigError)
    assert list(tmp_path.iterdir()) == []


def test_a_server_and_its_doctor_read_recipes_with_the_same_overrides(tmp_path: Path) -> None:
    settings = read_settings(ServerSettings, None, {"recipes": [RECIPE], "plaintext": True, "state": tmp_path})
    (read,) = recipes_of(settings, ["rounds=2"])
    assert read == shipped.recipe("digits-fednh", ["rounds=2"])
    words = ["server", "doctor", "--recipe", str(RECIPE), "--plaintext", "--state", str(tmp_path), "--json"]
    checks = json.loads(CliRunner().invoke(app, [*words, "--set", "method.momentun=0.5"]).stdout)
    assert "momentun" in json.dumps(checks)


def test_a_dry_run_of_a_comparison_has_every_recipe_with_every_seed(tmp_path: Path) -> None:
    called = ["compare", "digits-fednh", "digits-fedavg", "--dry-run", "--seeds", "0,1", "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(app, called)
    assert found.exit_code == 0
    assert found.stdout.count("\nrounds = ") == 4
    assert not (tmp_path / "out").exists()
