"""The tutorial that brings a dataset, transforms and a module, followed word for word; only pip is played."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.e2e.tutorials import FILE, ROOT, blocks
from tests.support.own_packages import write_metadata

from protofed.common.errors import DataError, PolicyViolationError

PAGE = ROOT / "docs" / "tutorials" / "bring-your-own.md"
PROTOFED, PYTEST = f"{sys.executable} -m protofed.deploy.cli", f"{sys.executable} -m pytest -q -p no:cacheprovider"
# What is not on the page, but said in its prose.
WRONG_RANGE = """protofed simulate mine.toml --set 'input.prepare=[{transform="monai/HistogramNormalize"}]'"""


def run(command: str, folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    typed = command.replace("protofed", PROTOFED, 1) if command.startswith("protofed ") else command
    typed = typed.replace("pytest", PYTEST, 1) if command.startswith("pytest ") else typed
    return subprocess.run(
        typed, shell=True, cwd=folder, env=dict(environment), capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(600)  # a dozen processes that import PyTorch
def test_the_tutorial_goes_from_a_new_dataset_to_the_policys_verdict(tmp_path: Path) -> None:
    environment, shown = {**os.environ, "OMP_NUM_THREADS": "1"}, dict[str, str]()
    for head, body in blocks(PAGE.read_text(encoding="utf-8")):
        if head.startswith(FILE):
            (tmp_path / head.removeprefix(FILE)).write_text(body, encoding="utf-8")
            continue
        for command in body.splitlines():
            if command.startswith("pip install -e './"):
                package = tmp_path / command.removeprefix("pip install -e './").partition("[")[0]
                write_metadata(package)
                environment["PYTHONPATH"] = f"{package}{os.pathsep}{environment.get('PYTHONPATH', '')}"
                continue
            done = run(command, tmp_path, environment)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            shown[command] = done.stdout
    assert "policy.toml lets the site take part" in shown["protofed client check mine.toml --settings site.toml"]

    wrong = run(WRONG_RANGE, tmp_path, environment)
    assert wrong.returncode == DataError.exit_code
    assert "values from 0 to 255 of an image; expected uint8, or floats from 0 to 1" in wrong.stderr

    policy = tmp_path / "policy.toml"
    text = policy.read_text(encoding="utf-8")
    for removed in (', "my-net"', '"torchvision/*", '):
        assert removed in text
        policy.write_text(text.replace(removed, "", 1), encoding="utf-8")
        refused = run("protofed client check mine.toml --settings site.toml", tmp_path, environment)
        assert refused.returncode == PolicyViolationError.exit_code, refused.stdout
