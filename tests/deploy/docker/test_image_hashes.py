"""deploy/docker/hashes.txt, and that the images' build has pip check it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tests.support.dockerfile import DOCKER, ROOT
from tests.support.image_hashes import EXTRAS

HASHES = dict(line.split(" ", 1) for line in (DOCKER / "hashes.txt").read_text(encoding="utf-8").splitlines()[1:])


@pytest.fixture
def build() -> dict[str, Any]:
    return runpy.run_path(str(DOCKER / "build.py"))


def test_every_line_has_a_hash_of_a_tested_version() -> None:
    assert all(re.fullmatch(r"(--hash=sha256:[0-9a-f]{64} ?)+", hashes) for hashes in HASHES.values())
    assert HASHES.keys() <= pins(ROOT / "constraints.txt") | pins(DOCKER / "tools.txt"), "renew with make constraints"


def test_all_that_the_build_asks_for_has_one(build: dict[str, Any]) -> None:
    names = {pin.partition("==")[0] for pin in HASHES}
    asked = {Requirement(line).name for line in build["requirements"](ROOT / "pyproject.toml", EXTRAS)}
    assert {canonicalize_name(name) for name in asked} <= names
    assert pins(DOCKER / "tools.txt") <= HASHES.keys()


def test_dependencies_are_installed_by_their_hashes(
    build: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []
    own = build["dependencies"].__globals__
    own["ENVIRONMENT"], own["_pip"] = tmp_path, lambda *arguments: calls.append(arguments)
    monkeypatch.chdir(ROOT)
    build["dependencies"]("report")
    assert calls[0][:3] == ("install", "--no-compile", "--constraint=hashes.txt")
    (pip,) = [pin.partition("==")[2] for pin in HASHES if pin.startswith("pip==")]
    assert Version(pip) >= Version("26.1"), "older ones refuse constraints with hashes"


def pins(path: Path) -> set[str]:
    """The names as PEP 503 normalises them."""
    lines = [line.partition("==") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line]
    return {f"{canonicalize_name(name)}=={version}" for name, _, version in lines}
