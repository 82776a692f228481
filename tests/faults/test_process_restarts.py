"""Processes that end otherwise are started again, and only those."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.processes import Processes

from protofed.common.config.recipe import Recipe


def ending(here: Processes, name: str, *codes: int) -> Callable[[], None]:
    """Starts a process that ends with the next of these codes."""
    left = iter(codes)

    def start() -> None:
        here.running[name] = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({next(left)})"])

    start()
    return start


def test_what_ends_otherwise_is_started_again_until_all_have_ended_well(
    tmp_path: Path, recipe_of: Callable[..., Recipe]
) -> None:
    here = Processes.of(tmp_path, recipe_of("fedavg"))
    starters = {"well": ending(here, "well", 0), "twice": ending(here, "twice", 9, 1, 0)}
    assert here.until_done(starters) == 2
    assert here.finish(["well", "twice"]) == [0, 0]


def test_what_never_ends_well_is_told_with_the_logs(tmp_path: Path, recipe_of: Callable[..., Recipe]) -> None:
    here = Processes.of(tmp_path, recipe_of("fedavg"))
    (tmp_path / "server.log").write_text("disk is broken")
    here.running["server"] = subprocess.Popen(["sleep", "60"])
    with pytest.raises(AssertionError, match="disk is broken"):
        here.until_done({"server": lambda: None}, patience_s=0.1)
    here.end()
    assert here.running["server"].poll() is not None
