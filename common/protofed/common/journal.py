"""An append-only record: JSON lines, each with the hash of the line before, each durable before `append` returns.

Editing, removing, moving or adding a line breaks the chain. Cutting lines off the end does not: keep the newest hash.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from blake3 import blake3

from protofed.common import archive
from protofed.common.errors import DiskFailure, StateError

Fact: TypeAlias = str | int | float | bool | list["Fact"] | None
TORN = "torn"  # the event that tells of half a line, left by a killed process and cut off
LONGEST = 4 << 20  # bytes of a line: bounds what a reader holds


@dataclass(frozen=True)
class Record:
    """One line; `seq` counts from 1, `at` is UTC in RFC 3339, `prev` and `hash` are BLAKE3-256 in hex."""

    seq: int
    at: str
    event: str
    facts: Mapping[str, Fact]
    prev: str
    hash: str = ""

    def line(self) -> bytes:
        """As it stands in the file."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"

    def sealed(self) -> Record:
        """With the hash of all the rest."""
        return replace(self, hash=blake3(replace(self, hash="").line()).hexdigest())


NOTHING = Record(0, "", "", {}, "")


class Journal:
    """The one writer of a file; makes it if it is missing. Threads may share it.

    Raises:
        StateError: the last line is not what was written, or (OutOfSpace, DiskFailure) the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            archive.sync_folder(path.parent)
        except OSError as error:
            raise archive.write_error(path, error) from error
        self._last, self._end, torn = self._tail(os.fstat(self._file).st_size)
        if torn:
            self._cut()
            self.append(TORN, bytes=torn)

    def append(self, event: str, **facts: Fact) -> None:
        """Add a line, durably.

        Raises:
            OutOfSpace, DiskFailure: nothing was added; after a DiskFailure nobody knows what is on the disk.
            ValueError, TypeError: a fact that JSON does not have, or more than `LONGEST` bytes.
        """
        with self._lock:
            at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            record = Record(self._last.seq + 1, at, event, facts, self._last.hash).sealed()
            if len(line := record.line()) > LONGEST:
                raise ValueError(f"a line of {len(line)} bytes: expected at most {LONGEST}")
            try:
                self._write(line)
            except OSError as error:
                raise archive.write_error(self._path, error) from error
            self._last, self._end = record, self._end + len(line)

    def close(self) -> None:
        """Release the file."""
        os.close(self._file)

    def _write(self, line: bytes) -> None:
        if os.fstat(self._file).st_size != self._end:
            raise DiskFailure(f"{self._path} was changed, or ends in half a line; start this process again")
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except BaseException:  # a signal's handler may raise anywhere
            self._cut()
            raise

    def _cut(self) -> None:
        """Back to the last whole line."""
        try:
            os.ftruncate(self._file, self._end)
            os.fsync(self._file)
        except OSError as error:
            raise DiskFailure(f"{self._path} ends in half a line: {error.strerror}; check the disk") from error

    def _tail(self, size: int) -> tuple[Record, int, int]:
        """The last whole line, where it ends, and the bytes of half a one behind it; reads no more than that takes."""
        *lines, torn = os.pread(self._file, 2 * LONGEST, max(0, size - 2 * LONGEST)).split(b"\n")
        half = len(torn)
        if lines and not torn and _parsed(lines[-1]) is None:
            half = len(lines.pop()) + 1
        if half == size:
            return NOTHING, 0, half
        last = _parsed(lines[-1]) if lines else None
        if last is None or last.sealed().line() != lines[-1] + b"\n":
            raise StateError(f"the last line of {self._path} is not what was written; restore it from a backup")
        return last, size - half, half


def records(path: Path) -> Iterator[Record]:
    """Every record, checked against the one before; one line at a time is in memory.

    Raises:
        StateError: naming the first line that was edited, removed, put in or moved; or the file cannot be read.
    """
    last = NOTHING
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST + 1):
                now = _parsed(line)
                if now is None or (now.seq, now.prev) != (last.seq + 1, last.hash) or now.sealed().line() != line:
                    raise StateError(f"{path}: record {last.seq + 1} is not what was written there; ask for a backup")
                yield (last := now)
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}; expected a journal") from error


def verify(path: Path) -> int:
    """How many records there are, all checked as by `records`."""
    return sum(1 for _ in records(path))


def _parsed(line: bytes) -> Record | None:
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        return Record(**json.loads(line))
    return None
