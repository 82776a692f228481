"""Moves an audit log's older segments to an archive, compressed. The log's writer may run: it uses the newest one only.

A segment leaves the state folder once the archive has it durably and it reads back as the same bytes. So a process that
is killed leaves each segment in one of the two places, or in both, and the next call goes on.
"""

from __future__ import annotations

import glob
import gzip
import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protofed.common.errors import ConfigError, StateError
from protofed.common.storage import files
from protofed.common.storage.journal import COMPRESSED, Segment, compressed_path, segments
from protofed.deploy.audit.log import AuditError, AuditStatus, verify

PIECE_BYTES = 1 << 20
LEVEL = 6  # level 9 takes twice as long for 2 to 4 per cent, xz ten times as long for a fifth
_GZIP = 31  # of zlib: a file of gzip without a name and a time, so that equal segments make equal files


@dataclass(frozen=True)
class Moved:
    """One segment that is in the archive now.

    Attributes:
        file: in the archive.
        size, compressed: bytes before and after.
    """

    number: int
    file: Path
    size: int
    compressed: int


def archive(path: Path, folder: Path, *, visible: bool = True) -> list[Moved]:
    """Move all segments but the newest, the oldest first.

    Args:
        path: of the log's first segment, there or not.
        folder: of this log alone; made if it is missing.

    Raises:
        AuditError: the log was changed; nothing was moved.
        ConfigError: the folder has the archive of another log, or is the log's own.
        StateError: another process archives into the folder, or a file cannot be read or written.
    """
    if folder.resolve() == path.parent.resolve():
        raise ConfigError(f"{folder} is the log's own folder; expected another one, of this log alone")
    if not folder.exists():
        files.make_private(folder)
    lock = files.Lock(folder)
    try:
        files.sweep([folder], f"{glob.escape(path.stem)}.*{COMPRESSED}")  # others may write here, too
        *closed, newest = segments(path)
        status = verify(path, visible=visible)
        _check_continues(path, folder, [*closed, newest], status)
        return [_move(segment, compressed_path(folder / path.name, segment.number)) for segment in closed]
    finally:
        lock.release()


def _check_continues(path: Path, folder: Path, here: list[Segment], status: AuditStatus) -> None:
    """Check that the archive ends where the log begins, or has some of its segments already."""
    archived = segments(folder / path.name)
    if not archived:
        return
    last, first, newest = archived[-1], here[0], here[-1]
    if last.number >= newest.number:
        raise ConfigError(
            f"the archive already has {last.path}, but the log's newest segment is {newest.number}. The archive is of "
            "another log, or the log was restored from a backup. Name another folder"
        )
    if last.number < first.number and (
        last.number != first.number - 1 or verify(last.path, visible=False).newest != status.before
    ):
        raise ConfigError(
            f"{first.path} does not follow {last.path}: expected the folder that has the segment before; "
            "name it, or move that segment here"
        )


def _move(segment: Segment, target: Path) -> Moved:
    """Compress a segment into the archive, unless it is there, and remove it here."""
    mode = segment.path.stat().st_mode & 0o777
    if not target.exists():
        files.write_pieces(target, _compressed(segment), mode)
    size = _common_size(segment, Segment(segment.number, target))
    try:
        segment.path.unlink()
        files.sync_folder(segment.path.parent)
    except OSError as error:
        raise files.write_error(segment.path, error) from error
    return Moved(segment.number, target, size, target.stat().st_size)


def _compressed(segment: Segment) -> Iterator[bytes]:
    compressor = zlib.compressobj(LEVEL, wbits=_GZIP)
    for piece in _pieces(segment):
        yield compressor.compress(piece)
    yield compressor.flush()


def _common_size(segment: Segment, archived: Segment) -> int:
    """The bytes that both have.

    Raises:
        AuditError: they differ.
    """
    size = 0
    for piece, other in itertools.zip_longest(_pieces(segment), _pieces(archived)):
        if piece != other:
            raise AuditError(
                f"{archived.path} and {segment.path} differ: the archive is of another log, or the file was damaged. "
                "No file was removed. Name another folder, or restore the file from a backup"
            )
        size += len(piece)
    return size


def _pieces(segment: Segment) -> Iterator[bytes]:
    try:
        with segment.open() as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise AuditError(
            f"{segment.path} cannot be decompressed: it was cut off or changed; ask for a backup"
        ) from error
    except OSError as error:
        raise StateError(f"cannot read {segment.path}: {error.strerror}; expected a part of an audit log") from error
