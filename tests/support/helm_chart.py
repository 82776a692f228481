"""The Helm chart with values of our own: checked by its schema, and rendered as Helm does."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import typer
import yaml
from typer.core import TyperGroup

from protofed.deploy.cli import main

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tests/deploy/helm"
CHART, VALUES = ROOT / "deploy/helm/protofed", HERE / "chart_values"
GOCODE = Path("/usr/share/gocode")
RELEASE, NAMESPACE = "study1", "ml"
RENDERS = shutil.which("go") is not None and (GOCODE / "src/github.com/Masterminds/sprig").is_dir()
rendering = pytest.mark.skipif(
    not RENDERS, reason="nothing renders the chart here (apt: golang-go golang-github-masterminds-sprig-dev)"
)
Object: TypeAlias = dict[str, Any]


class RefusedError(Exception):
    """The chart does not render with such values."""


def load(path: Path) -> Object:
    """A YAML file with one object."""
    loaded: Object = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def case_values(case: str) -> Object:
    """What a user says; the rest is the chart's."""
    return load(VALUES / f"{case}.yaml")


def merged(values: Object) -> Object:
    """With the chart's own values, as Helm puts them together."""
    return _over(load(CHART / "values.yaml"), values)


def schema() -> Object:
    loaded: Object = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return loaded


def schema_errors(values: Object) -> list[str]:
    """What the schema has against values: where, and why."""
    checker = importlib.import_module("jsonschema").Draft7Validator(schema())
    found = [leaf for error in checker.iter_errors(merged(values)) for leaf in _leaves(error)]
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


@functools.cache
def objects(case: str) -> list[Object]:
    """All that the chart makes of a case's values; not to be changed."""
    return rendered(case_values(case))


def rendered(values: Object) -> list[Object]:
    """All that the chart makes of values.

    Raises:
        RefusedError: a template refuses them.
    """
    asked = {"chart": str(CHART), "values": merged(values), "release": RELEASE, "namespace": NAMESPACE}
    done = subprocess.run([_renderer()], input=json.dumps(asked), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RefusedError(done.stderr)
    texts: dict[str, str] = json.loads(done.stdout)
    return documents("\n---\n".join(text for path, text in texts.items() if path.endswith(".yaml")))


def documents(text: str) -> list[Object]:
    """The objects of a manifest, by kind and name."""
    found = [one for one in yaml.safe_load_all(text) if one]
    return sorted(found, key=lambda one: (one["kind"], one["metadata"]["name"]))


def of_kind(case: str, kind: str) -> list[Object]:
    return [one for one in objects(case) if one["kind"] == kind]


def named(case: str, kind: str, name: str) -> Object:
    (found,) = [one for one in of_kind(case, kind) if one["metadata"]["name"] == name]
    return found


def pod(stateful: Object) -> Object:
    """What a StatefulSet's pod is to be."""
    spec: Object = stateful["spec"]["template"]["spec"]
    return spec


def containers(stateful: Object) -> list[Object]:
    """Of its pod, those that only prepare, too."""
    return [*pod(stateful)["initContainers"], *pod(stateful)["containers"]]


def parsed_arguments(stateful: Object) -> Object:
    """What the command line makes of the daemon's arguments."""
    name, start, *arguments = pod(stateful)["containers"][0]["args"]
    daemon = _commands().commands[name]
    assert isinstance(daemon, TyperGroup)
    return daemon.commands[start].make_context(start, list(arguments)).params


@functools.cache
def _commands() -> TyperGroup:
    group = typer.main.get_command(main.app)
    assert isinstance(group, TyperGroup)
    return group


def volume(stateful: Object, name: str) -> Object:
    (found,) = [one for one in pod(stateful)["volumes"] if one["name"] == name]
    assert isinstance(found, dict)
    return found


@functools.cache
def _renderer() -> Path:
    program = Path(tempfile.mkdtemp()) / "render"
    context = os.environ | {"GO111MODULE": "off", "GOPATH": str(GOCODE), "GOFLAGS": ""}
    subprocess.run(["go", "build", "-o", program, HERE / "helm_render/main.go"], env=context, check=True)
    return program


def _over(below: Object, above: Object) -> Object:
    together = copy.deepcopy(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(together.get(key), dict)
        together[key] = _over(together[key], value) if both else value
    return together


def _leaves(error: Any) -> list[Any]:
    """What is really wrong, where several things would do."""
    return [leaf for inner in error.context for leaf in _leaves(inner)] or [error]
