"""The last steps of logging: values as plain JSON, and lines that are written whole or not at all."""

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
FIRST_KEYS = ("timestamp", "level", "event", "site", "run", "round", "incident")  # not redacted: our own words and ids
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
_LAST_WORD = re.compile(r"\S*\Z")


def plain(value: Any, clean: Callable[[str], str], depth: int = 0) -> Any:
    """A value as plain JSON, its texts redacted by `clean`.

    Of arrays, lists of numbers and other objects only the type is shown: they could be pixels, labels or weights.
    """
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
    return _collection(value, clean, depth)


def _collection(value: Any, clean: Callable[[str], str], depth: int) -> Any:
    if depth >= DEEPEST or not isinstance(value, Mapping | Sequence | Set):
        return f"<{type(value).__name__}>"
    if isinstance(value, Mapping):
        if any(isinstance(key, Integral) for key in value):
            return "<numbers>"
        items = list(value.items())[:MOST_ITEMS]
        return {clean(str(key)): plain(item, clean, depth + 1) for key, item in items}
    some = list(value)[:MOST_ITEMS]
    if any(isinstance(item, Integral | float) for item in some):
        return "<numbers>"
    return [plain(item, clean, depth + 1) for item in some]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a library's __str__ may itself fail
        return "<no text>"


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return _LAST_WORD.sub("…", text[:LONGEST_TEXT])  # not within a word: half a secret would not be recognized


def printable(text: str) -> str:
    """Text with its control characters escaped, except for newlines: it cannot move a terminal's cursor."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


class LineRenderer:
    """A structlog logger that writes to the current standard error; a line that cannot be written is dropped.

    Lock and state belong to the class, as structlog makes many loggers for the one stream.
    """

    _writing = threading.Lock()
    _torn = False  # the last write broke off within a line

    def msg(self, message: str) -> None:
        """Write one line; never raises, since logging must not end a daemon."""
        with suppress(OSError, ValueError, AttributeError), LineRenderer._writing:  # closed, full, or None
            self._write(f"{message}\n".encode(errors="backslashreplace"))

    debug = info = warning = error = critical = exception = log = msg

    def _write(self, data: bytes) -> None:
        try:
            handle = sys.stderr.fileno()
        except (OSError, ValueError):  # a replacement without a file, as in tests and notebooks
            sys.stderr.write(data.decode(errors="replace"))
            return
        # os.write, unbuffered: a killed process leaves no line in a buffer, and one call per line keeps lines whole.
        left = b"\n" + data if LineRenderer._torn else data
        whole = len(left)
        try:
            while left:
                left = left[os.write(handle, left) :]
        finally:
            LineRenderer._torn = LineRenderer._torn if len(left) == whole else bool(left)
