"""`protofed files`: each kind is whole, finds its parts where it was written, and takes nobody's file away."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from protofed.common.errors import ConfigError
from protofed.deploy import shipped
from protofed.deploy.cli.main import app
from protofed.deploy.shipped import KINDS, write_files

ROOT = Path(__file__).parents[2]
COMPOSE = ("compose.yaml", "compose.site.yaml")


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_written_as_it_is_in_the_repository(kind: str, tmp_path: Path) -> None:
    written = [path.relative_to(tmp_path) for path in write_files(tmp_path, [kind])]
    assert written
    changed = [path for path in written if (tmp_path / path).read_bytes() != (ROOT / "deploy" / path).read_bytes()]
    assert changed == ([Path(name) for name in (*COMPOSE, ".env.example")] if kind == "compose" else [])


@pytest.mark.parametrize("kind", KINDS)
def test_the_wheel_has_what_a_kind_needs(kind: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for path in KINDS[kind].paths:
        above = {str(Path("deploy") / folder) for folder in (Path(path), *Path(path).parents)} & set(included)
        assert above, path
        assert all(included[name] == f"protofed/{name}" for name in above)


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_builds_nothing_and_is_otherwise_the_same(name: str, tmp_path: Path) -> None:
    write_files(tmp_path, ["compose"])
    ours, theirs = loaded(ROOT / "deploy" / name), loaded(tmp_path / name)
    for service in ours["services"].values():
        service.pop("build", None)
    assert theirs["services"] == ours["services"]
    assert {key: theirs[key] for key in ("networks", "volumes")} == {key: ours[key] for key in ("networks", "volumes")}
    assert not re.search(r"build:|BUILD_NETWORK|INDEX_URL|\.\./", (tmp_path / name).read_text(encoding="utf-8"))


def test_what_compose_mounts_is_there(tmp_path: Path) -> None:
    write_files(tmp_path, ["compose"])
    for name in COMPOSE:
        text = (tmp_path / name).read_text(encoding="utf-8")
        mounted = {path.rstrip("/") for path in re.findall(r"(?:- |:-)\"?(\./[\w./-]+)", text)}
        assert {path for path in mounted if not (tmp_path / path).exists()} == set()
    used = set(re.findall(r"\$\{(\w+)", "".join((tmp_path / name).read_text(encoding="utf-8") for name in COMPOSE)))
    said = set(re.findall(r"^(?:# )?(\w+)=", (tmp_path / ".env.example").read_text(encoding="utf-8"), re.MULTILINE))
    assert said - used <= {"COMPOSE_PROJECT_NAME", "COMPOSE_PROFILES"}, "settings that nothing reads"
    for site in ("evaluator", "site-1", "site-5"):
        assert (tmp_path / "docker/compose/data" / site).is_dir()


def test_the_chart_has_prometheus_rules_as_files(tmp_path: Path) -> None:
    write_files(tmp_path, ["helm"])
    rules = tmp_path / "helm/protofed/rules"
    assert not rules.is_symlink()
    assert sorted(path.name for path in rules.iterdir()) == ["alerts.yml", "recording.yml"]


def said_above(line: str) -> bool:
    """The head of alerts.yml says where the files of its `runbook_url` are."""
    return line.strip().startswith("runbook_url: docs/")


def test_no_file_names_a_place_that_only_a_clone_has(tmp_path: Path) -> None:
    """But where it says so: `deploy/…` and `docs/…` are of the repository."""
    for path in write_files(tmp_path, ()):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert (
                not re.search(r"\.\./|(?<!/)\bdocs/|\bdeploy/", line)
                or "clone" in line
                or "repository" in line
                or said_above(line)
            ), line


@pytest.mark.parametrize("kind", [None, "compose"])
def test_a_file_with_other_content_is_not_overwritten(kind: str | None, tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites/digits.toml").write_text("mine")
    with pytest.raises(ConfigError, match=r"digits\.toml"):
        write_files(tmp_path, [kind] if kind else [])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "sites/digits.toml"]
    assert (tmp_path / "sites/digits.toml").read_text() == "mine"


def test_kinds_that_share_files_can_be_written_one_after_the_other(tmp_path: Path) -> None:
    assert write_files(tmp_path, ["dashboards"])
    assert tmp_path / "grafana/dashboards/rounds.json" not in write_files(tmp_path, ["compose"])
    assert write_files(tmp_path, ["compose", "dashboards"]) == []


def test_the_command_lists_writes_and_suggests(tmp_path: Path) -> None:
    run = CliRunner()
    assert [row["kind"] for row in json.loads(run.invoke(app, ["files", "--list", "--json"]).output)] == list(KINDS)
    told = run.invoke(app, ["files", str(tmp_path), "policies", "--json"])
    assert sorted(json.loads(told.output)) == sorted(
        str(tmp_path / f"policies/{name}.toml") for name in shipped.files("policies")
    )
    assert "did you mean 'dashboards'?" in str(run.invoke(app, ["files", str(tmp_path), "dashbords"]).exception)
    assert isinstance(run.invoke(app, ["files"]).exception, ConfigError)
