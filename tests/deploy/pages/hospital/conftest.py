"""The state folder of a site that took part in a run of 0.3.0."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return shutil.copytree(Path(__file__).parents[3] / "golden" / "v0_3_0" / "site-1", tmp_path / "site-1")
