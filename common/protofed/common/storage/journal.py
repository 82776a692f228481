"""An append-only record: JSON lines, each with the hash of the line before, each durable before `append` returns.

Editing, removing, moving or adding a line breaks the chain. Cutting lines off the end does not, nor does writing all of
it anew: keep the newest hash elsewhere, and look for it later.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from blake3 import blake3

from protofed.common.errors import DiskFailureError, StateError
from protofed.common.storage import files

Fact: TypeAlias = str | int | float | bool | list["Fact"] | dict[str, "Fact"] | None
TORN = "torn"  # the event that tells of half a line, left by a killed process and cut off
LONGEST = 4 << 20  # bytes of a line: bounds what a reader holds
TOLD_EVERY = 1000  # records


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
        return json.dumps(vars(self), sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"

    def sealed(self) -> Record:
        """With the hash of all the rest."""
        return replace(self, hash=blake3(replace(self, hash="").line()).hexdigest())


NOTHING = Record(0, "", "", {}, "")


class TamperedError(StateError):
    """A line that is not what was written there. All lines before are good, but for the last of them, perhaps."""


class HalfLineError(StateError):
    """The file ends within a line: its writer was killed, or is writing just now. All lines before are good."""


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
            files.sync_folder(path.parent)
        except OSError as error:
            raise files.write_error(path, error) from error
        self._last, self._end, torn = self._tail(os.fstat(self._file).st_size)
        if torn:
            self._cut()
            self.append(TORN, bytes=torn)

    def append(self, event: str, **facts: Fact) -> None:
        """Add a line, durably.

        Raises:
            OutOfSpaceError, DiskFailureError: nothing was added; after the latter nobody knows what is on the disk.
            ValueError, TypeError: a fact that JSON does not have, or more than `LONGEST` bytes.
        """
        self.append_all([(event, facts)])

    def append_all(self, entries: Sequence[tuple[str, Mapping[str, Fact]]]) -> None:
        """Add lines, (event, facts) each, with one fsync: all of them or, when it raises, none.

        A process that is killed meanwhile may leave some of them, the first ones.

        Raises:
            As `append`.
        """
        with self._lock:
            at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            last, lines = self._last, []
            for event, facts in entries:
                last = Record(last.seq + 1, at, event, facts, last.hash).sealed()
                if len(line := last.line()) > LONGEST:
                    raise ValueError(f"a line of {len(line)} bytes: expected at most {LONGEST}")
                lines.append(line)
            if not (block := b"".join(lines)):
                return
            try:
                self._write(block)
            except OSError as error:
                raise files.write_error(self._path, error) from error
            self._last, self._end = last, self._end + len(block)

    def close(self) -> None:
        """Release the file."""
        os.close(self._file)

    def _write(self, lines: bytes) -> None:
        if os.fstat(self._file).st_size != self._end:
            raise DiskFailureError(f"{self._path} was changed, or ends in half a line; start this process again")
        try:
            while lines:
                lines = lines[os.write(self._file, lines) :]
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
            raise DiskFailureError(f"{self._path} ends in half a line: {error.strerror}; check the disk") from error

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


def records(path: Path, read: Callable[[int], object] = lambda _: None) -> Iterator[Record]:
    """Every record, checked against the one before; one line at a time is in memory.

    Args:
        read: told now and then how many bytes were read.

    Raises:
        HalfLine: behind the last whole line there is half a one.
        Tampered: naming the first line that was edited, removed, put in or moved.
        StateError: the file cannot be read.
    """
    last = NOTHING
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST + 1):
                now = _parsed(line)
                if not line.endswith(b"\n") and len(line) <= LONGEST:
                    raise HalfLineError(_half(path, last, line))
                if now is None or (now.seq, now.prev) != (last.seq + 1, last.hash) or now.sealed().line() != line:
                    raise TamperedError(_bad(path, last))
                yield (last := now)
                if last.seq % TOLD_EVERY == 0:
                    read(file.tell())
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}; expected a journal") from error


def verify(path: Path) -> int:
    """How many records there are, all checked as by `records`."""
    return sum(1 for _ in records(path))


def _bad(path: Path, last: Record) -> str:
    """What is wrong behind the last good record; each of the good ones is on the line of its number."""
    return (
        f"{path}: line {last.seq + 1}: record {last.seq + 1} is not what was written there: it, or the one before it, "
        "was edited, put in, taken out or moved; ask for a backup"
    )


def _half(path: Path, last: Record, line: bytes) -> str:
    return (
        f"{path}: line {last.seq + 1}: only {len(line)} bytes of record {last.seq + 1}: its writer is writing now, or "
        "was killed while it wrote, and cuts them off when it starts again"
    )


def _parsed(line: bytes) -> Record | None:
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        return Record(**json.loads(line))
    return None
