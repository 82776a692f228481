"""The digest of the code that computes a job: what changes it, and what becomes of a job of other code."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from protofed.client.method import client_methods
from protofed.common.config.recipe import Recipe
from protofed.common.errors import StateError
from protofed.deploy.experiments import code_digest
from protofed.deploy.experiments.code_digest import CodeDigest, digest_code
from protofed.deploy.experiments.experiment import ExperimentJob
from protofed.server.method import server_methods

Recipes = Callable[..., Recipe]
CLIENT, SERVER = "protofed.client.methods.", "protofed.server.methods."
HALF = '''
"""What it is."""
from ourplugin import helper  # a comment

@registry.register("mine")
class Mine:
    """A docstring."""

    def fit(self) -> int:
        """Another."""
        return helper.value() + 1
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a client half, which is nowhere imported."""
    package = tmp_path / "ourplugin"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "half.py").write_text(HALF)
    (package / "helper.py").write_text("def value() -> int:\n    return 1\n")
    (package / "other.py").write_text("raise RuntimeError\n")
    (package / "plug.py").write_text('METHOD = MethodPlugin(client="ourplugin.half:Mine", server="cwfedavg")\n')
    monkeypatch.syspath_prepend(tmp_path)
    for cached in (code_digest._file, code_digest._places, code_digest._folders):
        cached.cache_clear()
    return package


def modules(recipe: Recipe) -> set[str]:
    return set(digest_code(recipe).modules)


@pytest.mark.parametrize("method", sorted(client_methods))
def test_a_jobs_code_is_its_own_methods_and_no_others(method: str, recipe_of: Recipes) -> None:
    halves = [client_methods.get(method).__module__, server_methods.get(method).__module__]
    found = {name for name in modules(recipe_of(method)) if name.startswith((CLIENT, SERVER))}
    assert found.issuperset(halves)
    texts = [inspect.getsource(sys.modules[half]) for half in halves]
    for other in found - set(halves):  # only what a half imports besides
        assert any(f"import {other}" in text or f"from {other} import" in text for text in texts), other


def test_it_covers_what_computes_and_libraries_and_not_what_shows(
    recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = modules(recipe_of("fednh"))
    computing = ("client.training.loop", "client.models.networks", "client.data.partition", "client.agent.agent")
    for name in (*computing, "server.rounds.aggregation.aggregation", "common.codec", "deploy.simulation.workers"):
        assert f"protofed.{name}" in found
    for name in ("deploy.experiments.table", "deploy.cli.main", "server.rpc.server", "client.transport.grpc_link"):
        assert f"protofed.{name}" not in found
    assert "server.methods.maximal_separation" in {name.removeprefix("protofed.") for name in found}
    before = digest_code(recipe_of("fedavg"))
    assert {"python", "numpy", "torch"} <= before.libraries.keys()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9" if name == "torch" else "1")
    after = digest_code(recipe_of("fedavg"))
    assert "torch" in after.changes(before)
    assert after.whole != before.whole
    assert before.modules == after.modules


def test_a_plugins_code_counts_without_being_imported(plugin: Path, recipe_of: Recipes) -> None:
    recipe = recipe_of("fedavg").model_copy(update={"method": recipe_of("fedavg").method.model_copy()})
    table = {**recipe.model_dump(mode="json"), "method": {"name": "ourplugin.plug:METHOD"}}
    recipe = Recipe.model_validate(table)
    before = digest_code(recipe)
    ours = {name for name in before.modules if name.startswith("ourplugin")}
    assert ours == {"ourplugin", "ourplugin.plug", "ourplugin.half", "ourplugin.helper"}
    assert "protofed.server.methods.cwfedavg" in before.modules
    assert "ourplugin" not in sys.modules
    (plugin / "helper.py").write_text("def value() -> int:\n    return 2\n")
    assert digest_code(recipe).changes(before) == ["ourplugin.helper"]


def test_a_tasks_code_counts_in_both_halves(plugin: Path, recipe_of: Recipes) -> None:
    """No module imports the half in PyTorch: it is named by its path."""
    findings = {"task": {"name": "multi-label"}, "classes": 3, "class_names": ("even", "loop", "large")}
    own = {"task": {"name": "ourplugin.grades:Grades"}}
    classes = recipe_of("fedavg")
    recipes = [Recipe.model_validate({**classes.model_dump(mode="json"), **table}) for table in (findings, own)]
    assert "protofed.client.tasks.multi_label" in modules(recipes[0]) - modules(classes)
    (plugin / "grades.py").write_text('class Grades:\n    client = "ourplugin.half:Mine"\n')
    assert {"ourplugin.grades", "ourplugin.half", "ourplugin.helper"} <= modules(recipes[1])
    code = code_digest.InstalledCode()
    assert len({code.of(recipe).whole for recipe in (classes, *recipes)}) == 3, "they share no digest"
    assert "ourplugin" not in sys.modules


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("# a comment", "# another one", False),
        ('"""A docstring."""', '"""It says more."""', False),
        ('"""What it is."""\n', "", False),
        ("        return", "\n\n        return", False),
        ('register("mine")', 'register("mine", "yours")', False),
        ("+ 1", "+ 1.0", True),
        ('        """Another."""\n', '        print("Another.")\n', True),
        ("def fit", "def train", True),
    ],
)
def test_what_changes_no_number_changes_no_digest(old: str, new: str, changed: bool) -> None:
    assert old in HALF
    digests = {code_digest._read(text.encode(), "ourplugin").digest for text in (HALF, HALF.replace(old, new))}
    assert len(digests) == 1 + changed


@pytest.fixture
def started(recipe_of: Recipes, tmp_path: Path) -> tuple[ExperimentJob, CodeDigest]:
    """A job that was interrupted, and the code that it was started with."""
    job = ExperimentJob(recipe_of("fedavg"), tmp_path / "small-fedavg-seed0")
    job.claim()
    code = digest_code(job.recipe)
    assert job.changes(code) == []
    job.begin(code)
    (job.state / "sites").mkdir(parents=True)
    return job, code


def test_a_job_goes_on_with_the_code_that_began_it_alone(started: tuple[ExperimentJob, CodeDigest]) -> None:
    job, code = started
    job.begin(code)
    edited = code.model_copy(update={"modules": {**code.modules, "protofed.common.codec": "0"}})
    assert job.changes(edited) == ["protofed.common.codec"]
    with pytest.raises(StateError, match=r"changed: protofed\.common\.codec"):
        job.begin(edited)
    job.begin_again()
    assert not job.state.exists()
    assert job.changes(edited) == []
    assert json.loads((job.folder / "recipe.json").read_text())["name"] == job.recipe.name
    job.begin(edited)
