"""Named points where a test makes a process die, hang or fail: PROTOFED_FAILPOINT="name:2=kill" acts the second time.

Actions: `kill` (SIGKILL to itself), `sleep10` (block for 10 s), `until/a/file` (block until that file is there),
`raise` (an error whose text no peer may get).
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
PATIENT_TEXT = "patient Jane Doe, born 1970-01-01"  # of `raise`; tests look for it in what peers get
SERVER = (
    *("chunk-written", "upload-sealed", "commit-recorded", "enroll-answered", "loop"),
    *("broadcast-stored", "round-opened", "aggregation-started", "aggregation-done", "state-stored", "round-published"),
)
REFINEMENTS = ("aggregate-kept", "refined")  # of a round that is refined, at the server and at its evaluator
CLIENT = ("fetched", "batch-done", "epoch-done", "fit-done", "staged", "pushed", "settled")
BUDGET = ("budget-asked", "budget-spent")  # of a site whose fit has noise: before and after the ledger's line
JOURNAL = ("segment-full", "segment-started")  # of the daemon whose audit log begins a new segment
SUMS = (  # of a site in a secure aggregation: what it promises is stored, and not sent yet
    *("sum-started", "sum-share", "sum-contributors", "sum-agree-contributors", "sum-reveal-contributors"),
    *("sum-mask", "sum-agree", "sum-reveal"),
)
SERVER_SUMS = ("sum-step-closed", "sum-step-asked", "sum-opened")
NAMES = (*SERVER, *CLIENT, *REFINEMENTS, *BUDGET, *JOURNAL, *SUMS, *SERVER_SUMS)


_armed: tuple[str, int, str, Iterator[int]] | None = None  # point, the n-th time, action; counter of times


def arm(setting: str | None) -> None:
    """Set what `reach` does from now on; called once at a process's start, with the environment variable's value.

    Raises:
        ConfigError: an unknown name, or a wrong syntax.
    """
    global _armed
    if not setting:
        _armed = None
        return
    match = re.fullmatch(r"([a-z-]+)(?::([1-9]\d*))?=(kill|raise|sleep\d+|until/.+)", setting)
    if match is None:
        raise ConfigError(f"{VARIABLE}={setting}: expected name[:times]=kill, raise, sleep10 or until/a/file")
    if match[1] not in NAMES:
        raise unknown("failpoint", match[1], NAMES)
    _armed = match[1], int(match[2] or 1), match[3], itertools.count(1)


def reach(name: str) -> None:
    """Act if this point is armed; one comparison if none is."""
    if _armed is None:
        return
    point, nth, action, times = _armed
    if point != name or next(times) != nth:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "raise":
        raise RuntimeError(PATIENT_TEXT)
    if action.startswith("until"):
        while not os.path.exists(action.removeprefix("until")):
            time.sleep(0.02)
        return
    time.sleep(int(action.removeprefix("sleep")))
