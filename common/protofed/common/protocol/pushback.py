"""When a refused call may be tried again: metadata of the answer, by gRPC's own name for it.

gRPC reads that name only in its own retries, which are off on both sides: ours read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

KEY = "grpc-retry-pushback-ms"
LONGEST_S = 60.0  # a daemon waits no longer, whatever a server says
_MAX_DIGITS = 12


def retry_metadata(retry_after_s: float | None) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of an answer; none if the time is not known."""
    if retry_after_s is None:
        return ()
    return ((KEY, str(math.ceil(1000 * min(max(0.0, retry_after_s), LONGEST_S)))),)


def retry_after_s(metadata: Iterable[Any] | None) -> float:
    """Seconds to wait before the next attempt, at most `LONGEST_S`; 0.0: the metadata (key, value) do not say."""
    text = str(dict(metadata or ()).get(KEY, ""))
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        return 0.0
    return min(int(text) / 1000, LONGEST_S)
