"""Follows an audit log that a daemon writes: reads it whole once, and from then on what was added, each record checked.

An edit within what was read is noticed when it changes the size of a file, or a file that is no longer written to; the
newest file's only by `recheck`, which reads all of it again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from protofed.common.errors import StateError
from protofed.common.storage.journal import (
    LONGEST,
    NOTHING,
    SEGMENT,
    HalfLineError,
    Record,
    Segment,
    TamperedError,
    following,
    records,
    segments,
)


@dataclass(frozen=True)
class FollowedLog:
    """What is known of a log.

    Attributes:
        there: whether there is a log at all.
        problem: why its chain of hashes is broken, or it cannot be read; empty: neither.
        last_number: of the last good record, from 1; 0: there is none.
        newest: its hash.
        read_at: Unix time at which it was last read whole.
        missing: how many of the oldest segments are not here.
    """

    there: bool = False
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
        begin: called before the log is read whole: what was taken before is to be forgotten.
        take: called with each record, in order, once it is checked.
    """

    path: Path
    begin: Callable[[], object]
    take: Callable[[Record], object]
    _seen: list[_Signature] = field(default_factory=list)
    _last: Record = NOTHING
    _segment: int = 0  # the number of the segment that was read last
    _offset: int = 0  # in it, behind the last whole line
    _state: FollowedLog = FollowedLog()

    def look(self) -> FollowedLog:
        """Read what is new."""
        found = segments(self.path)
        now = [_signature(segment) for segment in found]
        if now == self._seen and self._state.read_at:
            return self._state
        if self._state.problem and _same_but_grown(self._seen, now):
            return self._state  # growth mends nothing
        if not self._state.problem and self._state.last_number and _same_but_grown(self._seen, now):
            self._guarded(lambda: self._read_on(found))
        else:
            self._read_whole(found)
        self._seen = now
        return self._state

    def recheck(self) -> FollowedLog:
        """Read all of it again."""
        self._seen, self._state = [], FollowedLog()
        return self.look()

    def _read_whole(self, found: list[Segment]) -> None:
        self.begin()
        self._last, self._segment, self._offset = NOTHING, 1, 0
        missing = max(0, found[0].number - 1) if found else 0
        self._state = FollowedLog(bool(found), read_at=time.time(), missing=missing)
        if found:
            self._guarded(self._read_all)

    def _read_all(self) -> None:
        with contextlib.suppress(HalfLineError):  # being written just now
            for record in records(self.path):  # also those of a segment that has begun since `segments` were listed
                if record.event == SEGMENT and isinstance(number := record.facts.get("number"), int):
                    self._segment, self._offset = number, 0
                self._add(record, len(record.line()))

    def _read_on(self, found: list[Segment]) -> None:
        """The rest of the segment that was read last, and those after it."""
        for segment in found:
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
