"""A log's last steps: values as JSON has them, and lines that never fail or tear."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import UTC, date, datetime
from enum import Enum
from numbers import Integral
from pathlib import Path
from typing import Any

LONGEST_TEXT = 20_000  # characters of one value
MOST_ITEMS = 200
DEEPEST = 4
KEPT = ("timestamp", "level", "event", "site", "run", "round", "incident")  # ids and our own words, in this order
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
_LAST_WORD = re.compile(r"\S*\Z")


def plain(value: Any, clean: Callable[[str], str], depth: int = 0) -> Any:
    """A value as JSON has it, its texts cleaned. Of numbers by the list, arrays and objects there is only the kind."""
    match value:
        case None | bool():
            return value
        case Enum():
            return plain(value.value, clean, depth)
        case Integral():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else str(value)
        case str():
            return _cut(clean(_cut(value)))
        case datetime() if value.tzinfo is not None:
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case Path() | date():
            return clean(str(value))
        case BaseException():
            return _cut(clean(f"{type(value).__name__}: {_text(value)}"))
        case bytes() | bytearray() | memoryview():
            return f"<{len(value)} bytes>"
    return _several(value, clean, depth)


def _several(value: Any, clean: Callable[[str], str], depth: int) -> Any:
    if depth >= DEEPEST or not isinstance(value, Mapping | Sequence | Set):
        return f"<{type(value).__name__}>"
    if isinstance(value, Mapping):
        if any(isinstance(key, Integral) for key in value):
            return "<numbers>"
        items = list(value.items())[:MOST_ITEMS]
        return {clean(str(key)): plain(one, clean, depth + 1) for key, one in items}
    some = list(value)[:MOST_ITEMS]
    if any(isinstance(one, Integral | float) for one in some):
        return "<numbers>"
    return [plain(one, clean, depth + 1) for one in some]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # whatever an exception of others does
        return "<no text>"


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return _LAST_WORD.sub("…", text[:LONGEST_TEXT])  # half a secret would not be known as one


def printable(text: str) -> str:
    """Lines for a terminal: what others wrote can move no cursor."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


class LineRenderer:
    """A logger that writes to standard error as it is at that moment; what cannot be written is left out."""

    _writing = threading.Lock()
    _torn = False  # half a line stands there

    def msg(self, message: str) -> None:
        """Write one line."""
        with suppress(OSError, ValueError, AttributeError), LineRenderer._writing:  # closed, full, or not there at all
            self._write(f"{message}\n".encode(errors="backslashreplace"))

    debug = info = warning = error = critical = exception = log = msg

    def _write(self, data: bytes) -> None:
        try:
            handle = sys.stderr.fileno()
        except (OSError, ValueError):  # a stand-in without a file
            sys.stderr.write(data.decode(errors="replace"))
            return
        left = b"\n" + data if LineRenderer._torn else data
        whole = len(left)
        try:
            while left:
                left = left[os.write(handle, left) :]
        finally:
            LineRenderer._torn = LineRenderer._torn if len(left) == whole else bool(left)
