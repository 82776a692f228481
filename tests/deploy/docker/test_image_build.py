"""deploy/docker/build.py, the steps that need no network; hashes.txt, by which pip checks what it installs."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tests.support.dockerfile import DOCKER, ROOT, STAGES, TARGETS
from tests.support.image_hashes import EXTRAS


@pytest.fixture
def build() -> dict[str, Any]:
    return runpy.run_path(str(DOCKER / "build.py"))


def test_requirements_of_the_images_and_no_others(build: dict[str, Any]) -> None:
    server, client = (
        {Requirement(line).name for line in build["requirements"](ROOT / "pyproject.toml", extras(target))}
        for target in TARGETS
    )
    assert {"grpcio", "jinja2", "psycopg"} <= server
    assert not {"torch", "torchvision", "scikit-learn"} & server
    assert {"grpcio", "torch", "pydicom", "onnxruntime", "nibabel", "openslide-bin", "monai"} <= client
    assert "pylibjpeg-libjpeg" not in server | client, "it is under the GPL-3"
    with pytest.raises(SystemExit, match="there is no reports; expected some of client, postgres, report"):
        build["requirements"](ROOT / "pyproject.toml", "postgres,reports")
    step = [sys.executable, str(DOCKER / "build.py"), "torch", "rocm", ""]
    done = subprocess.run(step, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ACCELERATOR=rocm: expected cpu or cuda" in done.stderr


def extras(target: str) -> str:
    """Of an image, unless told otherwise."""
    (line,) = [rest for rest in STAGES[f"{target}-files"].said("ARG") if "_EXTRAS=" in rest]
    return line.partition("=")[2]


def test_what_is_installed_without_a_pin_is_named(build: dict[str, Any], tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name, version in (("Pin_ned", "1.0"), ("torch", "2.0+cpu"), ("newer", "3"), ("loose", "4"), ("protofed", "0")):
        (packages / f"{name}-{version}.dist-info").mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (packages / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
    pins = tmp_path / "pins.txt"
    pins.write_text("# these\npin.ned==1.0\ntorch==2.0\nnewer==2\n")
    assert build["unpinned"](tmp_path, pins) == ["loose==4", "newer==3"]


@pytest.mark.parametrize(
    ("wanted", "cuda", "told"),
    [("cpu", "", ""), ("cpu", "13.2", "note: this is a PyTorch with CUDA"), ("cuda", "13.2", "")],
)
def test_the_kind_of_pytorch_is_looked_at(
    build: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], wanted: str, cuda: str, told: str
) -> None:
    installed(build, tmp_path, cuda)
    build["accelerator"](wanted)
    assert capsys.readouterr().out.startswith(told)
    assert bool(told) == bool(cuda and wanted == "cpu")


def test_a_pytorch_without_cuda_is_none_for_cuda(build: dict[str, Any], tmp_path: Path) -> None:
    installed(build, tmp_path, "")
    with pytest.raises(SystemExit, match="ACCELERATOR=cuda: this PyTorch has no CUDA"):
        build["accelerator"]("cuda")


def installed(build: dict[str, Any], environment: Path, cuda: str) -> None:
    """An environment whose PyTorch says this of its CUDA."""
    build["accelerator"].__globals__["ENVIRONMENT"] = environment
    (environment / "bin").mkdir()
    (environment / "bin" / "python").write_text(f"#!/bin/sh\necho {cuda}\n")
    (environment / "bin" / "python").chmod(0o755)


def test_the_readme_has_the_extras_of_the_images_and_all_have_hashes() -> None:
    told = (DOCKER / "README.md").read_text(encoding="utf-8")
    for target in TARGETS:
        assert f"of the {target}: `{extras(target)}`" in told
        assert f"make wheelhouse EXTRAS={extras(target)} " in told
        assert set(extras(target).split(",")) <= set(EXTRAS.split(","))


HASHES = dict(line.split(" ", 1) for line in (DOCKER / "hashes.txt").read_text(encoding="utf-8").splitlines()[1:])


def test_all_that_the_build_asks_for_has_a_hash_of_a_tested_version(build: dict[str, Any]) -> None:
    assert all(re.fullmatch(r"(--hash=sha256:[0-9a-f]{64} ?)+", hashes) for hashes in HASHES.values())
    assert HASHES.keys() <= pins(ROOT / "constraints.txt") | pins(DOCKER / "tools.txt"), "renew with make constraints"
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
