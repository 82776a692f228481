"""Audit logs as files: checking that a log is what was written, and following a log that a daemon writes.

A follower reads the log whole once. Then it reads and checks only new records. It notices an edit of old records if the
edit changes a file's size, or changes a file that is no longer written to. An edit of the newest file needs `recheck`,
which reads the whole log again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from protofed.common.codec import is_digest
from protofed.common.errors import ConfigError, ProtofedError, StateError, short
from protofed.common.storage.journal import (
    LONGEST,
    NOTHING,
    SEGMENT,
    TORN,
    HalfLineError,
    Record,
    Segment,
    TamperedError,
    following,
    records,
    segments,
)
from protofed.deploy.progress import BYTES, progress

AUDIT_FILE = "audit.jsonl"  # of a state folder, a site's or a server's: the first segment


class AuditError(ProtofedError):
    """An audit log was changed since it was written."""

    exit_code = 1


@dataclass(frozen=True)
class AuditStatus:
    """A log whose chain of hashes is whole. A log that was cut off at its end has one, too: compare `newest`.

    Attributes:
        count: of records.
        last_number: of the last record; more than `count` if the oldest segments are not here.
        missing_segments: how many of the oldest segments are not here.
        before: hash of the record before the first one here; empty if the log begins here.
        first, last: time of the first and last record in UTC; empty if there are no records.
        newest: hash of the last record.
        torn: half lines of killed processes, which a record says were cut off.
        half_line: describes half a line at the log's end; empty if there is none.
        numbers: record numbers (from 1) by hash, of the expected hashes that the log has; `before` may be one of them.
    """

    path: Path
    count: int = 0
    last_number: int = 0
    missing_segments: int = 0
    before: str = ""
    first: str = ""
    last: str = ""
    newest: str = ""
    torn: int = 0
    half_line: str = ""
    numbers: dict[str, int] = field(default_factory=dict)


def log_file(path: Path) -> Path:
    """The log's first segment (it may be in an archive), given it or its folder; a later segment: itself.

    Raises:
        ConfigError: there is no log.
    """
    file = path / AUDIT_FILE if path.is_dir() else path
    if not segments(file):
        raise ConfigError(f"{path}: no audit log; expected a file, or a state folder with {AUDIT_FILE}")
    return file


def verify(
    path: Path, expected: Collection[str] = (), *, archive: Path | None = None, visible: bool = True
) -> AuditStatus:
    """Read a log whole and check every record against the one before.

    Args:
        expected: hashes to look for; printed by an earlier `verify` and kept elsewhere.
        archive: a folder with the log's oldest segments.
        visible: show a progress bar on a terminal.

    Raises:
        AuditError: names the first bad record and its line.
    """
    hashes, count, torn, first, last, half_line = frozenset(expected), 0, 0, None, None, ""
    numbers: dict[str, int] = {}
    try:
        for record in read(path, archive, visible=visible):
            if first is None and record.prev in hashes:
                numbers[record.prev] = record.seq - 1
            first, last, count = first or record, record, count + 1
            torn += record.event == TORN
            if record.hash in hashes:
                numbers[record.hash] = record.seq
    except HalfLineError as end:  # no tampering: the daemon may be writing it just now, or was killed
        half_line = str(end)
    except TamperedError as error:
        raise AuditError(str(error)) from error
    if first is None or last is None:
        return AuditStatus(path, half_line=half_line)
    missing = segments(path, archive)[0].number - 1 if first.prev else 0
    return AuditStatus(
        path, count, last.seq, missing, first.prev, first.at, last.at, last.hash, torn, half_line, numbers
    )


def read(path: Path, archive: Path | None = None, *, visible: bool = True) -> Iterator[Record]:
    """The records of a log, each checked, with a progress bar on a terminal if `visible`."""
    parts = segments(path, archive)
    unknown = any(segment.is_compressed for segment in parts)  # how many bytes there are
    size = None if unknown else sum(segment.path.stat().st_size for segment in parts) or None
    with progress("reading the log", size, BYTES, visible=visible) as bar:
        yield from records(path, bar.to, archive=archive)


def read_hash(text: str) -> str:
    """A hash as `verify` prints it: 64 hex digits.

    Raises:
        ConfigError: the text is no hash.
    """
    if not is_digest(text):
        raise ConfigError(
            f"'{short(text)}' is no hash: expected 64 of 0-9 and a-f, as `protofed audit verify` prints it"
        )
    return text


def missing(expected: str, logs: Iterable[AuditStatus]) -> str:
    """The error for an expected hash that no log has."""
    ends = ", ".join(
        f"{log.path} begins with record {log.last_number - log.count + 1}, ends with record {log.last_number}"
        for log in logs
    )
    return (
        f"no record has the hash {expected}; {ends or 'no log is good'}. If the record's segment was moved to an "
        "archive, name the archive, too. Otherwise records were cut off at the end, or the log was written anew: ask "
        "for a backup"
    )


@dataclass(frozen=True)
class FollowedLog:
    """What is known of a log.

    Attributes:
        exists: whether there is a log at all.
        problem: why its chain of hashes is broken, or it cannot be read; empty: neither.
        last_number: of the last good record, from 1; 0: there is none.
        newest: its hash.
        read_at: Unix time at which it was last read whole.
        missing: how many of the oldest segments are not here.
    """

    exists: bool = False
    problem: str = ""
    last_number: int = 0
    newest: str = ""
    read_at: float = 0.0
    missing: int = 0


_Signature = tuple[int, int, int, int]  # of a segment: number, inode, size, time of change


@dataclass
class LogFollower:
    """One log; not for several threads at once.

    Args:
        path: of the log's first segment, there or not.
        begin: called before the log is read whole. Forget what was taken before.
        take: called with each record, in order, once it is checked.
    """

    path: Path
    begin: Callable[[], object]
    take: Callable[[Record], object]
    _signatures: list[_Signature] = field(default_factory=list)
    _last: Record = NOTHING
    _segment: int = 0  # the number of the segment that was read last
    _offset: int = 0  # in it, behind the last whole line
    _state: FollowedLog = FollowedLog()

    def look(self) -> FollowedLog:
        """Read what is new."""
        parts = segments(self.path)
        now = [_signature(segment) for segment in parts]
        if now == self._signatures and self._state.read_at:
            return self._state
        if self._state.problem and _same_but_grown(self._signatures, now):
            return self._state  # growth mends nothing
        if not self._state.problem and self._state.last_number and _same_but_grown(self._signatures, now):
            self._guarded(lambda: self._read_on(parts))
        else:
            self._read_whole(parts)
        self._signatures = now
        return self._state

    def recheck(self) -> FollowedLog:
        """Read the whole log again."""
        self._signatures, self._state = [], FollowedLog()
        return self.look()

    def _read_whole(self, parts: list[Segment]) -> None:
        self.begin()
        self._last, self._segment, self._offset = NOTHING, 1, 0
        missing = max(0, parts[0].number - 1) if parts else 0
        self._state = FollowedLog(bool(parts), read_at=time.time(), missing=missing)
        if parts:
            self._guarded(self._read_all)

    def _read_all(self) -> None:
        with contextlib.suppress(HalfLineError):  # being written just now
            for record in records(self.path):  # also those of a segment that has started since `segments` were listed
                if record.event == SEGMENT and isinstance(number := record.facts.get("number"), int):
                    self._segment, self._offset = number, 0
                self._add(record, len(record.line()))

    def _read_on(self, parts: list[Segment]) -> None:
        """The rest of the segment that was read last, and those after it."""
        for segment in parts:
            if segment.number < self._segment:
                continue
            if segment.number > self._segment:
                self._segment, self._offset = segment.number, 0
            with segment.open() as file:
                file.seek(self._offset)
                while (line := file.readline(LONGEST + 1)).endswith(b"\n"):
                    if (record := following(self._last, line)) is None:
                        number = self._last.seq + 1
                        raise TamperedError(
                            f"{segment.path}: record {number} is not what was written there; ask for a backup"
                        )
                    self._add(record, len(line))

    def _add(self, record: Record, size: int) -> None:
        self._offset += size
        self._last = record
        self.take(record)

    def _guarded(self, read: Callable[[], None]) -> None:
        problem = ""
        try:
            read()
        except StateError as error:  # TamperedError, too
            problem = str(error)
        except OSError as error:
            problem = f"cannot read {self.path}: {error.strerror}"
        self._state = replace(self._state, problem=problem, last_number=self._last.seq, newest=self._last.hash)


def _signature(segment: Segment) -> _Signature:
    status = segment.path.stat()
    return segment.number, status.st_ino, status.st_size, status.st_mtime_ns


def _same_but_grown(before: list[_Signature], now: list[_Signature]) -> bool:
    """Whether the log is what it was, with lines added to its end."""
    if not before or len(now) < len(before) or now[: len(before) - 1] != before[:-1]:
        return False
    last, same = before[-1], now[len(before) - 1]
    return (same[:2] == last[:2] and same[2] > last[2]) or (len(now) > len(before) and same[:3] == last[:3])
