"""An append-only log: JSON lines, each with the hash of the line before, each durable before `append` returns.

Editing, removing, moving or inserting a line breaks the chain of hashes. Cutting lines off the end does not, nor does
rewriting the whole file: against these, keep the newest hash elsewhere and look it up later.
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
TORN = "torn"  # event: half a line, left by a killed process, was cut off
LONGEST = 4 << 20  # bytes of a line: bounds a reader's memory
PROGRESS_EVERY = 1000  # records between two calls of `on_progress`


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
        """The bytes of this record in the file, one form for equal records."""
        return json.dumps(vars(self), sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"

    def sealed(self) -> Record:
        """This record with `hash` computed over all its other fields."""
        return replace(self, hash=blake3(replace(self, hash="").line()).hexdigest())


NOTHING = Record(0, "", "", {}, "")


class TamperedError(StateError):
    """A line is not what was written there. All lines before it are intact, except perhaps the one just before."""


class HalfLineError(StateError):
    """The file ends within a line: its writer was killed, or is writing right now. All lines before are intact."""


class Journal:
    """The only writer of a file; creates it if it is missing. Threads may share it.

    Raises:
        StateError: the last line is not what was written.
        OutOfSpaceError, DiskFailureError: the file cannot be written.
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
            self._truncate()
            self.append(TORN, bytes=torn)

    def append(self, event: str, **facts: Fact) -> None:
        """Add a line, durably.

        Raises:
            OutOfSpaceError: nothing was added.
            DiskFailureError: nothing was added, and what is on the disk is uncertain: the process must end.
            ValueError, TypeError: a value that JSON does not have, or a line of more than `LONGEST` bytes.
        """
        self.append_all([(event, facts)])

    def append_all(self, entries: Sequence[tuple[str, Mapping[str, Fact]]]) -> None:
        """Add lines, (event, facts) each, with one fsync: all of them or, when it raises, none.

        A process that is killed in between may leave only the first ones.

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
        except BaseException:  # also what a signal handler raises: the file must not end within a line
            self._truncate()
            raise

    def _truncate(self) -> None:
        """Cut the file back to its last whole line."""
        try:
            os.ftruncate(self._file, self._end)
            os.fsync(self._file)
        except OSError as error:
            raise DiskFailureError(f"{self._path} ends in half a line: {error.strerror}; check the disk") from error

    def _tail(self, size: int) -> tuple[Record, int, int]:
        """The last whole record, where its line ends, and how many bytes of a torn line follow it.

        Reads two lines' worth from the end, however long the file is.
        """
        *lines, torn = os.pread(self._file, 2 * LONGEST, max(0, size - 2 * LONGEST)).split(b"\n")
        half = len(torn)
        # After a power cut the end of a line, newline included, may be on the disk without its beginning.
        if lines and not torn and _parsed(lines[-1]) is None:
            half = len(lines.pop()) + 1
        if half == size:
            return NOTHING, 0, half
        last = _parsed(lines[-1]) if lines else None
        if last is None or last.sealed().line() != lines[-1] + b"\n":
            raise StateError(f"the last line of {self._path} is not what was written; restore it from a backup")
        return last, size - half, half


def records(path: Path, on_progress: Callable[[int], object] = lambda _: None) -> Iterator[Record]:
    """Every record, checked against the one before; one line at a time is in memory.

    Args:
        on_progress: called every `PROGRESS_EVERY` records with the number of bytes read so far.

    Raises:
        HalfLineError: the file ends within a line.
        TamperedError: naming the first line that was edited, removed, inserted or moved.
        StateError: the file cannot be read.
    """
    last = NOTHING
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST + 1):
                record = _parsed(line)
                if not line.endswith(b"\n") and len(line) <= LONGEST:
                    raise HalfLineError(_half_line_text(path, last, line))
                if (
                    record is None
                    or (record.seq, record.prev) != (last.seq + 1, last.hash)
                    or record.sealed().line() != line
                ):
                    raise TamperedError(_tampered_text(path, last))
                yield (last := record)
                if last.seq % PROGRESS_EVERY == 0:
                    on_progress(file.tell())
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}; expected a journal") from error


def verify(path: Path) -> int:
    """The number of records, all checked; errors as of `records`."""
    return sum(1 for _ in records(path))


def _tampered_text(path: Path, last: Record) -> str:
    # Record n is on line n: a torn line is cut off before the next is written.
    return (
        f"{path}: line {last.seq + 1}: record {last.seq + 1} is not what was written there: it, or the one before it, "
        "was edited, inserted, removed or moved; ask for a backup"
    )


def _half_line_text(path: Path, last: Record, line: bytes) -> str:
    return (
        f"{path}: line {last.seq + 1}: only {len(line)} bytes of record {last.seq + 1}: its writer is writing now, or "
        "was killed while it wrote, and cuts them off when it starts again"
    )


def _parsed(line: bytes) -> Record | None:
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        return Record(**json.loads(line))
    return None
