"""Verifies audit logs: whether a log still is what was written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from protofed.common.codec import is_digest
from protofed.common.errors import ConfigError, ProtofedError, short
from protofed.common.storage.journal import TORN, HalfLineError, Record, TamperedError, records, segments
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
    path: Path, expected: Collection[str] = (), *, archive: Path | None = None, shown: bool = True
) -> AuditStatus:
    """Read a log whole and check every record against the one before.

    Args:
        expected: hashes to look for; printed by an earlier `verify` and kept elsewhere.
        archive: a folder with the log's oldest segments.
        shown: show a progress bar on a terminal.

    Raises:
        AuditError: names the first bad record and its line.
    """
    hashes, count, torn, first, last, half_line = frozenset(expected), 0, 0, None, None, ""
    numbers: dict[str, int] = {}
    try:
        for record in read(path, archive, shown=shown):
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


def read(path: Path, archive: Path | None = None, *, shown: bool = True) -> Iterator[Record]:
    """The records of a log, each checked, with a progress bar on a terminal if `shown`."""
    found = segments(path, archive)
    unknown = any(segment.is_compressed for segment in found)  # how many bytes there are
    size = None if unknown else sum(segment.path.stat().st_size for segment in found) or None
    with progress("reading the log", size, BYTES, shown=shown) as bar:
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
    """The error for an expected hash that none of these logs has."""
    ends = ", ".join(
        f"{log.path} begins with record {log.last_number - log.count + 1}, ends with record {log.last_number}"
        for log in logs
    )
    return (
        f"no record has the hash {expected}: since it was printed, its segment was moved to an archive (name it, too), "
        "records were cut off at the end, or the log was written anew; "
        f"{ends or 'no log is good'}; ask for a backup"
    )
