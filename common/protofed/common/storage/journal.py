"""An append-only log: JSON lines, each with the hash of the line before, each durable before `append` returns.

Editing, removing, moving or inserting a line breaks the chain of hashes. Cutting lines off the end does not, nor does
rewriting the whole log: against these, keep the newest hash elsewhere and look it up later.

A log that rotates is several files, segments: `audit.jsonl`, then `audit.000002.jsonl`, `audit.000003.jsonl` and so on.
The chain runs through them: a later segment's first record is a `segment`, with the hash of the last record before it
as its `prev`. A segment keeps its name for ever, and only the newest is written to: each of the others may be moved to
an archive. There it may be compressed, as `audit.000002.jsonl.gz`.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import itertools
import json
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import BufferedIOBase
from pathlib import Path
from typing import TypeAlias

from blake3 import blake3

from protofed.common import failpoint
from protofed.common.errors import DiskFailureError, StateError
from protofed.common.storage import files

SEGMENT_BYTES = 64 << 20  # a new segment begins above this: some 100,000 messages
COMPRESSED = ".gz"
_NUMBERED = re.compile(r"(.+)\.(\d{6,})")  # the name without its suffix


@dataclass(frozen=True)
class Segment:
    """One file of a journal; `number` counts from 1."""

    number: int
    path: Path

    @property
    def is_compressed(self) -> bool:
        """Whether it was archived: nothing is ever added to it."""
        return self.path.suffix == COMPRESSED

    def open(self) -> BufferedIOBase:
        """Its lines, decompressed; reading raises EOFError, zlib.error or BadGzipFile if they cannot be."""
        return gzip.open(self.path, "rb") if self.is_compressed else self.path.open("rb")


def segment_path(journal: Path, number: int) -> Path:
    """The file of a segment; the first one has the journal's own name."""
    return journal if number == 1 else journal.with_name(f"{journal.stem}.{number:06}{journal.suffix}")


def compressed_path(journal: Path, number: int) -> Path:
    """The file of a segment in an archive."""
    path = segment_path(journal, number)
    return path.with_name(path.name + COMPRESSED)


def segments(path: Path, archive: Path | None = None) -> list[Segment]:
    """A journal's files that are there, in order; given a later segment's file, that one alone.

    Args:
        archive: a folder with the oldest of them; one that is in both places is taken from beside `path`.
    """
    journal = path.with_suffix("") if path.suffix == COMPRESSED else path
    if match := _NUMBERED.fullmatch(journal.stem):
        return [Segment(int(match[2]), path)] if path.is_file() else []
    by_number = {} if archive is None else {one.number: one for one in segments(archive / journal.name)}
    # The compressed ones first: a segment that is being archived is there twice.
    beside = journal.parent.glob(f"{glob.escape(journal.stem)}*")
    for file in sorted(beside, key=lambda file: file.suffix != COMPRESSED):
        plain = file.with_suffix("") if file.suffix == COMPRESSED else file
        match = _NUMBERED.fullmatch(plain.stem)
        number = int(match[2]) if match is not None and match[1] == journal.stem else 1
        if plain == segment_path(journal, number) and file.is_file():
            by_number[number] = Segment(number, file)
    return [by_number[number] for number in sorted(by_number)]


Fact: TypeAlias = str | int | float | bool | list["Fact"] | dict[str, "Fact"] | None
TORN = "torn"  # event: half a line, left by a killed process, was cut off
SEGMENT = "segment"  # event: a segment with this number begins
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
    """A line or a segment is not what was written. All lines before are intact, except perhaps the one just before."""


class HalfLineError(StateError):
    """The file ends within a line: its writer was killed, or is writing right now. All lines before are intact."""


class Journal:
    """The only writer of a log; creates it if it is missing. Threads may share it.

    Args:
        path: of the first segment.
        segment_bytes: a segment of at least so many bytes is followed by a new one; None: there is one only.

    Raises:
        StateError: the last line is not what was written.
        OutOfSpaceError, DiskFailureError: the newest segment cannot be written.
    """

    def __init__(self, path: Path, segment_bytes: int | None = None) -> None:
        self._journal, self._segment_bytes, self._lock = path, segment_bytes, threading.Lock()
        newest = [Segment(1, path), *segments(path)][-1]
        if newest.is_compressed:
            raise StateError(
                f"{newest.path} belongs to an archive, and cannot be continued. Move it back to the archive"
            )
        self._number, self._path = newest.number, newest.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            files.sync_folder(path.parent)
        except OSError as error:
            raise files.write_error(self._path, error) from error
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
            if self._segment_bytes is not None and self._end >= self._segment_bytes and entries:
                self._begin_segment(self._number + 1)
            at, last, lines = _now(), self._last, list[bytes]()
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

    @property
    def newest(self) -> Record:
        """The last record; its `seq` is 0 if there is none."""
        return self._last

    def check(self) -> None:
        """Check that the newest segment on the disk is the file that is open.

        Raises:
            DiskFailureError: it was moved, removed or replaced.
        """
        with self._lock:
            files.check_same(self._path, self._file)

    def close(self) -> None:
        """Release the file."""
        os.close(self._file)

    def _begin_segment(self, number: int) -> None:
        """Go on in a new file, which gets its name with its first record in it: a kill leaves all of it or nothing."""
        path = segment_path(self._journal, number)
        if path.exists():
            raise DiskFailureError(f"another process made {path}. Start this process again")
        first = Record(self._last.seq + 1, _now(), SEGMENT, {"number": number}, self._last.hash).sealed()
        failpoint.reach("segment-full")
        files.write(path, first.line())
        failpoint.reach("segment-started")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise files.write_error(path, error) from error
        os.close(self._file)
        self._file, self._path, self._number = descriptor, path, number
        self._last, self._end = first, len(first.line())

    def _write(self, lines: bytes) -> None:
        files.check_same(self._path, self._file)
        if os.fstat(self._file).st_size != self._end:
            raise DiskFailureError(f"{self._path} was changed, or ends in half a line. Start this process again")
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

        Reads two lines' worth from the end, however long the file is, and checks the chain of what it reads.
        """
        start = max(0, size - 2 * LONGEST)
        *lines, torn = os.pread(self._file, 2 * LONGEST, start).split(b"\n")
        half = len(torn)
        # After a power cut the end of a line, newline included, may be on the disk without its beginning.
        if lines and not torn and _parsed(lines[-1]) is None:
            half = len(lines.pop()) + 1
        if half == size and self._number == 1:
            return NOTHING, 0, half
        last = _parsed(lines[-1]) if lines else None
        if last is None or last.sealed().line() != lines[-1] + b"\n":
            raise StateError(f"the last line of {self._path} was changed. Restore the file from a backup")
        self._check_chain(lines[1:] if start else lines)  # the first of a part may have lost its beginning
        return last, size - half, half

    def _check_chain(self, lines: Sequence[bytes]) -> None:
        for before, line in itertools.pairwise(lines):
            if (earlier := _parsed(before)) is None or following(earlier, line + b"\n") is None:
                raise TamperedError(_tampered_text(str(self._path), earlier or NOTHING))


def records(
    path: Path, on_progress: Callable[[int], object] = lambda _: None, *, archive: Path | None = None
) -> Iterator[Record]:
    """Every record of all segments, checked against the one before; one line at a time is in memory.

    The oldest segments may be missing, since they may be moved to an archive: the first record then is a `segment`.

    Args:
        path: of the first segment, there or not; or of a later one, which is read alone.
        on_progress: called every `PROGRESS_EVERY` records with the number of bytes read so far.
        archive: a folder with the oldest segments.

    Raises:
        HalfLineError: the newest segment ends within a line.
        TamperedError: naming the first line that was edited, removed, inserted or moved; or the segment that is
            missing, truncated or exchanged.
        StateError: a file cannot be read.
    """
    parts = segments(path, archive) or [Segment(1, path)]
    last, offset = NOTHING, 0
    before: Segment | None = None
    for segment in parts:
        if before is not None and segment.number != before.number + 1:
            raise TamperedError(_missing_text(path, before, segment))
        try:
            with segment.open() as file:
                last = _start(segment, before, last, file.readline(LONGEST + 1))
                file.seek(0)
                for record in _chained(segment.path, file, last, is_newest=segment is parts[-1]):
                    yield (last := record)
                    if last.seq % PROGRESS_EVERY == 0:
                        on_progress(offset + file.tell())
                offset += file.tell()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TamperedError(_damaged_text(segment, last)) from error
        except OSError as error:
            raise StateError(f"cannot read {segment.path}: {error.strerror}; expected a journal") from error
        before = segment


def verify(path: Path) -> int:
    """The number of records, all checked; errors as of `records`."""
    return sum(1 for _ in records(path))


def _start(segment: Segment, before: Segment | None, last: Record, line: bytes) -> Record:
    """What the segment's first record has to follow: `last`, if the segment before is there.

    Raises:
        TamperedError: it does not, or it is not this segment's first record.
    """
    if segment.number == 1:
        return last
    first = _parsed(line)
    if first is None or first.event != SEGMENT or first.facts.get("number") != segment.number:
        raise TamperedError(
            f"{segment.path}: line 1: expected the record with which segment {segment.number} begins. The file was "
            "exchanged, or cut off at its beginning. Ask for a backup"
        )
    if before is None:
        return replace(NOTHING, seq=first.seq - 1, hash=first.prev)
    if first.seq > last.seq + 1:
        raise TamperedError(
            f"{before.path}: records {last.seq + 1} to {first.seq - 1} are missing. The file was cut off at its "
            "end, or exchanged. Ask for a backup"
        )
    if (first.seq, first.prev) != (last.seq + 1, last.hash):
        raise TamperedError(
            f"{segment.path}: record {first.seq} does not follow record {last.seq}, the last one of {before.path}. "
            "One of the two files was exchanged, or this record was edited. Ask for a backup"
        )
    return last


def _chained(path: Path, file: BufferedIOBase, last: Record, *, is_newest: bool) -> Iterator[Record]:
    """The records of one file, each checked against the one before."""
    number = 0
    while line := file.readline(LONGEST + 1):
        number, record = number + 1, following(last, line)
        if is_newest and not line.endswith(b"\n") and len(line) <= LONGEST:
            raise HalfLineError(_half_line_text(path, number, last, line))
        if record is None:
            raise TamperedError(_tampered_text(f"{path}: line {number}", last))
        yield (last := record)


def following(last: Record, line: bytes) -> Record | None:
    """The record of a line, newline included, if it is the one written behind `last`; None: it is not."""
    record = _parsed(line)
    chained = record is not None and (record.seq, record.prev) == (last.seq + 1, last.hash)
    return record if chained and record is not None and record.sealed().line() == line else None


def _missing_text(path: Path, before: Segment, after: Segment) -> str:
    names = [segment_path(path, number).name for number in range(before.number + 1, after.number)]
    missing = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return (
        f"{path.parent}: {missing} is missing between {before.path.name} and {after.path.name}. Only the oldest "
        "segments may be moved away. Bring the missing one back, or ask for a backup"
    )


def _tampered_text(where: str, last: Record) -> str:
    return (
        f"{where}: record {last.seq + 1} is not what was written there. Somebody edited, inserted, removed or moved "
        "it, or the record before it. Ask for a backup"
    )


def _damaged_text(segment: Segment, last: Record) -> str:
    return (
        f"{segment.path}: what follows record {last.seq} cannot be decompressed. The file was cut off or changed. "
        "Ask for a backup"
    )


def _half_line_text(path: Path, number: int, last: Record, line: bytes) -> str:
    return (
        f"{path}: line {number}: only {len(line)} bytes of record {last.seq + 1}. Its writer is writing now, or was "
        "killed while it wrote. When the writer starts again, it removes these bytes"
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _parsed(line: bytes) -> Record | None:
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        return Record(**json.loads(line))
    return None
