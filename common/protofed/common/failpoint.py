"""Named places where a test lets a process die, hang or fail: PROTOFED_FAILPOINT="name:2=kill" acts the second time.

Actions: `kill` (SIGKILL to itself), `sleep10` (block for 10 s), `raise` (an error whose text no peer may read).
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Iterator

from protofed.common.errors import ConfigError, unknown

VARIABLE = "PROTOFED_FAILPOINT"
PATIENT_TEXT = "patient Jane Doe, born 1970-01-01"  # what no peer may ever read
SERVER = (
    *("chunk-written", "upload-sealed", "commit-recorded", "enroll-answered", "loop"),
    *("broadcast-stored", "round-opened", "aggregation-begun", "aggregation-done", "state-stored", "round-published"),
)
CLIENT = ("fetched", "batch-done", "epoch-done", "fit-done", "staged", "pushed", "settled")
NAMES = (*SERVER, *CLIENT)


_armed: tuple[str, int, str, Iterator[int]] | None = None  # where, the how manieth time, what; times until now


def arm(setting: str | None) -> None:
    """Set what `reach` does from now on; the environment's word, taken once at the process's start.

    Raises:
        ConfigError: an unknown name, or another syntax.
    """
    global _armed
    if not setting:
        _armed = None
        return
    said = re.fullmatch(r"([a-z-]+)(?::([1-9]\d*))?=(kill|raise|sleep\d+)", setting)
    if said is None:
        raise ConfigError(f"{VARIABLE}={setting}: expected name[:times]=kill, raise or sleep and seconds")
    if said[1] not in NAMES:
        raise unknown("failpoint", said[1], NAMES)
    _armed = said[1], int(said[2] or 1), said[3], itertools.count(1)


def reach(name: str) -> None:
    """Do here what was set for this place, if anything was."""
    if _armed is None:
        return
    place, nth, action, times = _armed
    if place != name or next(times) != nth:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "raise":
        raise RuntimeError(PATIENT_TEXT)
    time.sleep(int(action.removeprefix("sleep")))
