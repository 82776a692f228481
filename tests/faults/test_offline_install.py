"""Row 94: the server's install from a folder of wheels with their hashes, on a machine without any network."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

REPOSITORY = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
OFFLINE = ("unshare", "--net")
pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root can take the network away"),
]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=REPOSITORY)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Filled where there is a network."""
    folder = tmp_path_factory.mktemp("wheels")
    binary = ("--only-binary=:all:", "--constraint=constraints.txt")
    built = run(*PIP, "wheel", "--no-deps", f"--wheel-dir={folder}", ".")
    done = run(*PIP, "download", f"--dest={folder}", *binary, *folder.glob("protofed-*.whl"))
    if built.returncode or done.returncode:
        pytest.skip(f"no package registry can be reached: {(built.stderr + done.stderr)[-300:]}")
    return folder


@pytest.fixture
def install(wheels: Path, tmp_path: Path) -> tuple[Path, list[str | Path]]:
    """An empty environment, and the command that fills it."""
    lines = [f"{name}=={version} --hash=sha256:{digest}" for (name, version), digest in known(wheels).items()]
    (tmp_path / "requirements.txt").write_text("\n".join(lines), encoding="ascii")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    source = ("--no-index", f"--find-links={wheels}", "--no-cache-dir")
    to = (*PIP, "--python", tmp_path / "venv", "install", *source)
    return tmp_path / "venv", [*OFFLINE, *to, "--require-hashes", f"--requirement={tmp_path / 'requirements.txt'}"]


def known(wheels: Path) -> dict[tuple[str, str], str]:
    """The hash of each wheel, by name and version."""
    found = {parse_wheel_filename(wheel.name)[:2]: wheel for wheel in sorted(wheels.glob("*.whl"))}
    return {
        (name, str(version)): hashlib.sha256(path.read_bytes()).hexdigest() for (name, version), path in found.items()
    }


def test_row_94_it_installs_without_a_network_and_is_what_its_list_says(
    wheels: Path, install: tuple[Path, list[str | Path]], tmp_path: Path
) -> None:
    environment, command = install
    assert (done := run(*command)).returncode == 0, done.stderr
    assert (checked := run(*PIP, "--python", environment, "check")).returncode == 0, checked.stdout
    version = run(*OFFLINE, environment / "bin" / "protofed", "--version")
    assert version.stdout.startswith("protofed "), version.stderr
    listing = ("--pyproject=pyproject.toml", "--validate", f"--output-file={tmp_path / 'sbom.json'}", environment)
    run(sys.executable, "-m", "cyclonedx_py", "environment", *listing)
    listed = json.loads((tmp_path / "sbom.json").read_text(encoding="utf-8"))["components"]
    versions = {(one["name"].lower().replace("_", "-"), one["version"]) for one in listed}
    assert versions == {wheel for wheel in known(wheels) if wheel[0] != "protofed"}  # which is the root of the list


def test_row_94_a_wheel_that_was_changed_is_refused(wheels: Path, install: tuple[Path, list[str | Path]]) -> None:
    environment, command = install
    changed = next(wheels.glob("blake3-*.whl"))
    whole = changed.read_bytes()
    changed.write_bytes(whole + b"\0")
    try:
        done = run(*command)
    finally:
        changed.write_bytes(whole)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not list(environment.glob("lib/*/site-packages/blake3*"))
