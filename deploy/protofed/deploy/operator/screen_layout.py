"""Which rows of `runs watch` fit on a screen; what is less important goes first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rows:
    """How many rows of each part are shown; the strip has all its lines or none, `gaps` is 1 if parts stand apart."""

    sites: int = 0
    problems: int = 0
    scores: int = 0
    strip: int = 0
    gaps: int = 0

    def lines(self, most_sites: int) -> int:
        """With their headings, and a line on the sites that are not shown."""
        tables = sum(1 + rows for rows in (self.sites, self.problems, self.scores) if rows)
        parts = sum(bool(rows) for rows in (self.sites, self.problems, self.scores, self.strip))
        more = 0 < self.sites < most_sites
        return tables + more + self.strip + self.gaps * parts


def fitting(there: Rows, room: int | None) -> Rows:
    """As many rows of what is there as fit into so many lines; None: all."""
    if room is None:
        return replace(there, gaps=1)
    rows = Rows()
    for wish, numbers in _wishes(there):
        for number in numbers:
            more = replace(rows, **{wish: max(number, getattr(rows, wish))})
            if more.lines(there.sites) <= room:
                rows = more
    return rows


def _wishes(there: Rows) -> Iterator[tuple[str, Iterable[int]]]:
    """From what matters most: a part, and how many rows of it, the fewest first."""
    order = (("sites", 3), ("problems", 1), ("scores", 1), ("strip", 1), ("sites", 6), ("scores", 3), ("problems", 3))
    for wish, most in order:
        have = getattr(there, wish)
        yield wish, [have] if wish == "strip" else range(1, min(most, have) + 1)
    yield "gaps", [1]
    for wish in ("sites", "problems", "scores"):
        yield wish, range(1, getattr(there, wish) + 1)
