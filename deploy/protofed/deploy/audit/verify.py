"""Audit logs: whether one is as it was written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from protofed.common.codec import is_digest
from protofed.common.errors import ConfigError, ProtofedError, short
from protofed.common.storage.journal import TORN, HalfLineError, Record, TamperedError, records
from protofed.deploy.console.progress import BYTES, progress

AUDIT_FILE = "audit.jsonl"  # of a state folder, a site's or a server's


class AuditError(ProtofedError):
    """An audit log is not what was written."""

    exit_code = 1


@dataclass(frozen=True)
class AuditStatus:
    """A log that is as it was written, as far as it can tell by itself.

    Attributes:
        first, last: when, in UTC; empty when there are no records.
        newest: the hash of the last record.
        cut: half lines that were cut off after a process had been killed.
        half: what is said of half a line at the end; empty if there is none.
        found: of the hashes that were looked for, where: the number of the record.
    """

    path: Path
    count: int = 0
    first: str = ""
    last: str = ""
    newest: str = ""
    cut: int = 0
    half: str = ""
    found: dict[str, int] = field(default_factory=dict)


def log_file(path: Path) -> Path:
    """The log itself, for a file or a state folder.

    Raises:
        ConfigError: there is none.
    """
    found = path / AUDIT_FILE if path.is_dir() else path
    if not found.is_file():
        raise ConfigError(f"{path}: no audit log; expected a file, or a state folder with {AUDIT_FILE}")
    return found


def verify(path: Path, expected: Collection[str] = ()) -> AuditStatus:
    """Read a log whole and check every record against the one before.

    Args:
        expected: hashes that may be in it.

    Raises:
        AuditError: naming the first bad record and its line.
    """
    wanted, count, cut, first, last, half = frozenset(expected), 0, 0, None, None, ""
    found: dict[str, int] = {}
    try:
        for record in read(path):
            first, last, count = first or record, record, count + 1
            cut += record.event == TORN
            if record.hash in wanted:
                found[record.hash] = record.seq
    except HalfLineError as end:
        half = str(end)
    except TamperedError as error:
        raise AuditError(str(error)) from error
    if first is None or last is None:
        return AuditStatus(path, half=half)
    return AuditStatus(path, count, first.at, last.at, last.hash, cut, half, found)


def read(path: Path, *, shown: bool = True) -> Iterator[Record]:
    """As `records`, behind a bar on a terminal if it may be `shown`."""
    size = path.stat().st_size if path.is_file() else None
    with progress("reading the log", size, BYTES, shown=shown) as bar:
        yield from records(path, bar.to)


def read_hash(text: str) -> str:
    """A hash as `verify` prints it.

    Raises:
        ConfigError: it is none.
    """
    if not is_digest(text):
        raise ConfigError(
            f"'{short(text)}' is no hash: expected 64 of 0-9 and a-f, as `protofed audit verify` prints it"
        )
    return text


def missing(expected: str, logs: Iterable[AuditStatus]) -> str:
    """What is said of a hash that none of these logs has."""
    ends = ", ".join(f"{log.path} ends with record {log.count}" for log in logs)
    return (
        f"no record has the hash {expected}: since it was printed, records were cut off at the end, or the log was "
        f"written anew; {ends or 'no log is good'}; ask for a backup"
    )
