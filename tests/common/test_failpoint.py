"""Failpoints: nothing unless asked for, and then exactly once at the named place."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protofed.common import failpoint
from protofed.common.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoint.arm(None)


@pytest.mark.parametrize(("which", "nth"), [("", 1), (":1", 1), (":3", 3)])
def test_it_acts_at_its_own_place_the_nth_time_and_never_again(which: str, nth: int) -> None:
    failpoint.arm(f"aggregation-done{which}=raise")
    acted = []
    for time_ in range(1, 6):
        failpoint.reach("aggregation-started")
        try:
            failpoint.reach("aggregation-done")
        except RuntimeError as error:
            acted.append((time_, str(error)))
    assert acted == [(nth, failpoint.PATIENT_TEXT)]


def test_sleep_blocks() -> None:
    failpoint.arm("loop=sleep1")
    began = time.monotonic()
    failpoint.reach("loop")
    assert time.monotonic() - began >= 1
    failpoint.reach("loop")
    assert time.monotonic() - began < 2


def test_until_blocks_until_the_file_is_there(tmp_path: Path) -> None:
    failpoint.arm(f"loop=until{tmp_path / 'go'}")
    reached = threading.Thread(target=failpoint.reach, args=("loop",))
    reached.start()
    reached.join(0.1)
    assert reached.is_alive()
    (tmp_path / "go").touch()
    reached.join(60)
    assert not reached.is_alive()


def test_kill_lets_nothing_follow() -> None:
    program = (
        "import os; from protofed.common import failpoint; failpoint.arm(os.environ[failpoint.VARIABLE])\n"
        "for turn in range(3):\n    print(turn, flush=True); failpoint.reach('chunk-written')"
    )
    environment = {**os.environ, failpoint.VARIABLE: "chunk-written:2=kill"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == b"0\n1\n"


@pytest.mark.parametrize("setting", ["loop", "loop=explode", "loop:0=kill", "loop=sleep", "loop=kill;loop=kill", "="])
def test_what_cannot_be_understood_is_refused_and_arms_nothing(setting: str) -> None:
    for wrong, told in ((setting, "expected name"), ("aggregation-dome=kill", "did you mean 'aggregation-done'")):
        with pytest.raises(ConfigError, match=told):
            failpoint.arm(wrong)
    for name in failpoint.NAMES:
        failpoint.reach(name)


def test_the_programs_reach_only_known_places() -> None:
    sources = [path for half in ("server", "client", "deploy") for path in (ROOT / half / "protofed").rglob("*.py")]
    reached = {name for path in sources for name in re.findall(r'reach\("([^"]*)"\)', path.read_text(encoding="utf-8"))}
    assert reached <= set(failpoint.NAMES)
