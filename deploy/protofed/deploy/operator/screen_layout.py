"""How many rows of each part of `runs watch` fit on a screen; the less important ones are left out first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rows:
    """Numbers of rows by part.

    Attributes:
        strip: lines of the last rounds: all of them or none.
        gaps: blank lines before each part, 0 or 1.
    """

    sites: int = 0
    problems: int = 0
    scores: int = 0
    strip: int = 0
    gaps: int = 0

    def lines(self, most_sites: int) -> int:
        """Lines on the screen: the rows with headings, and a line for the sites that are not shown."""
        tables = sum(1 + rows for rows in (self.sites, self.problems, self.scores) if rows)
        parts = sum(bool(rows) for rows in (self.sites, self.problems, self.scores, self.strip))
        has_hidden_sites = 0 < self.sites < most_sites
        return tables + has_hidden_sites + self.strip + self.gaps * parts


def fitting(available: Rows, room: int | None) -> Rows:
    """As many of the available rows as fit into `room` lines; None: all.

    Greedy: it raises one part after the other, in the order of `_priorities`, as long as all still fits.
    """
    if room is None:
        return replace(available, gaps=1)
    rows = Rows()
    for part, numbers in _priorities(available):
        for number in numbers:
            larger = replace(rows, **{part: max(number, getattr(rows, part))})
            if larger.lines(available.sites) <= room:
                rows = larger
    return rows


def _priorities(available: Rows) -> Iterator[tuple[str, Iterable[int]]]:
    """The parts by importance, each with the numbers of rows to try; a part comes again for more rows."""
    order = (("sites", 3), ("problems", 1), ("scores", 1), ("strip", 1), ("sites", 6), ("scores", 3), ("problems", 3))
    for part, most in order:
        rows_of_part = getattr(available, part)
        yield part, [rows_of_part] if part == "strip" else range(1, min(most, rows_of_part) + 1)
    yield "gaps", [1]
    for part in ("sites", "problems", "scores"):
        yield part, range(1, getattr(available, part) + 1)
