"""A model, a dataset and a task outside the repository: written by `protofed new`, tested by themselves, run."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.own_packages import write_metadata

from protofed.common.errors import ConfigError
from protofed.common.plugins import PluginKind
from protofed.deploy.templates.new import PACKAGE_TEMPLATES, PACKAGES, new_package

OWN = {PluginKind.MODEL: "our-net", PluginKind.DATASET: "our-scans", PluginKind.TASK: "our-grades"}
SCORES = {PluginKind.TASK: ("kappa", "near")}  # that `simulate` shows; of classes it shows the balanced accuracy


@pytest.fixture(params=OWN, ids=str)
def package(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's folder, on the path of processes, with the metadata that pip would install."""
    kind: PluginKind = request.param
    root = new_package(kind, OWN[kind], tmp_path)[0].parent
    write_metadata(root)
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return root


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=cwd)


def test_it_is_filled_in_imports_one_module_of_protofed_and_passes_its_own_tests(package: Path) -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.*") if "dist-info" not in str(path)}
    assert not [path for path, text in texts.items() if "$" in text]
    for path, text in texts.items():
        if path.suffix == ".py":
            modules = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
            assert {module for module in modules if module and module.startswith("protofed")} <= {
                "protofed.data",
                "protofed.models",
                "protofed.tasks",
                "protofed.testing.task_conformance",
            }
    done = python("-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", cwd=package)
    assert done.returncode == 0, done.stdout[-3000:]


def test_its_recipe_is_run_by_its_entry_point(package: Path) -> None:
    (recipe,) = (package / "recipes").glob("*.toml")
    done = python("-m", "protofed.deploy.cli", "simulate", str(recipe), "--set", "rounds=1", cwd=package)
    assert done.returncode == 0, done.stderr[-3000:]
    kind = next(kind for kind, name in OWN.items() if name == package.name)
    assert [word for word in SCORES.get(kind, ("balanced",)) if word not in done.stdout] == []


@pytest.mark.parametrize("kind", PACKAGES, ids=str)
def test_every_template_is_used(kind: PluginKind) -> None:
    there = {path.name.removesuffix(".tmpl") for path in (PACKAGE_TEMPLATES / kind).glob("*.tmpl")}
    assert there == set(PACKAGES[kind])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (PluginKind.MODEL, "resnet18"),
        (PluginKind.DATASET, "medmnist"),
        (PluginKind.DATASET, "a b"),
        (PluginKind.TASK, "regression"),
    ],
)
def test_a_name_that_is_taken_or_cannot_be_a_package_is_refused_by_its_kind(
    kind: PluginKind, name: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{kind} '{name}'|{kind} name '{name}'"):
        new_package(kind, name, tmp_path / "own")
    assert not (tmp_path / "own").exists()
