"""The files of a journal that rotates: `audit.jsonl`, then `audit.000002.jsonl`, `audit.000003.jsonl` and so on.

A segment keeps its name for ever, and only the newest is written to: each of the others may be moved to an archive.
There it may be compressed, as `audit.000002.jsonl.gz`.
"""

from __future__ import annotations

import glob
import gzip
import re
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

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
    found = {} if archive is None else {one.number: one for one in segments(archive / journal.name)}
    # The compressed ones first: a segment that is being archived is there twice.
    beside = journal.parent.glob(f"{glob.escape(journal.stem)}*")
    for file in sorted(beside, key=lambda file: file.suffix != COMPRESSED):
        plain = file.with_suffix("") if file.suffix == COMPRESSED else file
        match = _NUMBERED.fullmatch(plain.stem)
        number = int(match[2]) if match is not None and match[1] == journal.stem else 1
        if plain == segment_path(journal, number) and file.is_file():
            found[number] = Segment(number, file)
    return [found[number] for number in sorted(found)]
