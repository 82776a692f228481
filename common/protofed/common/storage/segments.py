"""The files of a journal that rotates: `audit.jsonl`, then `audit.000002.jsonl`, `audit.000003.jsonl` and so on.

A segment keeps its name for ever, and only the newest is written to: each of the others may be moved to an archive.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SEGMENT_BYTES = 64 << 20  # a new segment begins above this: some 100,000 messages
_NUMBERED = re.compile(r"(.+)\.(\d{6,})")  # the name without its suffix


@dataclass(frozen=True)
class Segment:
    """One file of a journal; `number` counts from 1."""

    number: int
    path: Path


def segment_path(journal: Path, number: int) -> Path:
    """The file of a segment; the first one has the journal's own name."""
    return journal if number == 1 else journal.with_name(f"{journal.stem}.{number:06}{journal.suffix}")


def segments(path: Path) -> list[Segment]:
    """A journal's files that are there, in order; given a later segment's file, that one alone."""
    if match := _NUMBERED.fullmatch(path.stem):
        return [Segment(int(match[2]), path)] if path.is_file() else []
    found = [Segment(1, path)] if path.is_file() else []
    for file in path.parent.glob(f"*{path.suffix}"):
        match = _NUMBERED.fullmatch(file.stem)
        if match is not None and match[1] == path.stem and file == segment_path(path, int(match[2])):
            found.append(Segment(int(match[2]), file))
    return sorted(found, key=lambda segment: segment.number)
