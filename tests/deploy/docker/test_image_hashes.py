"""deploy/docker/hashes.txt, and the installation by it: with pip, of wheels made here."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import zipfile
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.support.dockerfile import DOCKER, ROOT
from tests.support.image_hashes import EXTRAS

PLACES = (ROOT / "constraints.txt", DOCKER / "tools.txt")
WRONG = "0" * 64


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """build.py with two wheels, no index and an empty environment; `upper` needs `lower`."""
    steps = runpy.run_path(str(DOCKER / "build.py"))
    own: dict[str, Any] = steps["tools"].__globals__
    own["TOOLS"], own["ENVIRONMENT"] = Path(sys.executable).parent, tmp_path / "venv"
    own["_pip"].__kwdefaults__["environment"] = own["ENVIRONMENT"]
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "pins.txt"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pins.txt").write_text("lower==1.0\nupper==1.0\n")
    hashes = wheel(tmp_path, "lower"), wheel(tmp_path, "upper", "Requires-Dist: lower\n")
    write(*hashes)
    own["_environment"]()
    return own


def wheel(folder: Path, name: str, more: str = "") -> str:
    """Make one of version 1.0; its SHA-256."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{more}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return sha256(path.read_bytes()).hexdigest()


def write(lower: str, upper: str) -> None:
    Path("hashes.txt").write_text(f"# these\nlower==1.0 --hash=sha256:{lower}\nupper==1.0 --hash=sha256:{upper}\n")


def installed(build: dict[str, Any]) -> set[str]:
    folders = build["ENVIRONMENT"].glob("lib/python*/site-packages")
    return {package.name for package in distributions(path=[str(folder) for folder in folders])}


def test_what_is_asked_for_and_what_it_needs_is_installed_by_hash(build: dict[str, Any]) -> None:
    build["_install"](build["ENVIRONMENT"], "upper>=1")
    assert installed(build) == {"lower", "upper"}


def test_a_wheel_of_another_hash_ends_the_build(build: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    write(WRONG, sha256(Path("upper-1.0-py3-none-any.whl").read_bytes()).hexdigest())
    with pytest.raises(subprocess.CalledProcessError):
        build["_install"](build["ENVIRONMENT"], "upper>=1")
    assert not installed(build)
    monkeypatch.setenv("HASHES", "off")
    build["_install"](build["ENVIRONMENT"], "upper>=1")
    assert installed(build) == {"lower", "upper"}, "whoever says so gets it"


def test_a_package_without_a_hash_is_named(build: dict[str, Any]) -> None:
    Path("hashes.txt").write_text("lower==1.0+cpu --hash=sha256:0\nupper==1.0 --hash=sha256:0\n")
    with pytest.raises(SystemExit, match=r"hashes.txt lacks lower==1.0: a wheel of another .* HASHES=off"):
        build["_install"](build["ENVIRONMENT"], "upper>=1")


def test_a_word_that_is_neither_on_nor_off(build: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASHES", "no")
    with pytest.raises(SystemExit, match="HASHES=no: expected on or off"):
        build["_install"](build["ENVIRONMENT"], "upper>=1")


def test_every_hash_is_of_a_tested_version(build: dict[str, Any]) -> None:
    known = [line.split() for line in (DOCKER / "hashes.txt").read_text(encoding="utf-8").splitlines()[1:]]
    assert all(hashes for _, *hashes in known)
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for _, *hashes in known for one in hashes)
    pins = {pin for pin, *_ in known}
    assert len(pins) == len(known)
    assert pins <= pins_of(*PLACES), "renew with make constraints"
    asked = {Requirement(line).name for line in build["requirements"](ROOT / "pyproject.toml", EXTRAS)}
    names = {pin.partition("==")[0] for pin in pins}
    assert {canonicalize_name(name) for name in asked} <= names
    assert pins_of(PLACES[1]) <= pins


def pins_of(*places: Path) -> set[str]:
    """The pins, with the names as PEP 503 normalises them."""
    lines = [line for path in places for line in path.read_text(encoding="utf-8").splitlines() if "==" in line]
    return {f"{canonicalize_name(name)}=={version}" for name, _, version in (line.partition("==") for line in lines)}
