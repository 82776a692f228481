"""What tests wait for that other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], patience_s: float = 30.0, says: Callable[[], str] = str) -> float:
    """Until it holds; how many seconds that took.

    Raises:
        AssertionError: it does not within this time, with what `says` says.
    """
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + patience_s, says()
        time.sleep(0.02)
    return time.monotonic() - began
