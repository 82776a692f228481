"""Pieces of Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

# What docs/tables.py makes, between its marks. A mark alone is a part that was not written yet.
GENERATED = re.compile(
    r"^<!-- generated: ([\w-]+) -->$(?:\n(?:(?!^<!-- generated: ).)*?^<!-- end -->$)?", re.MULTILINE | re.DOTALL
)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown; `|` in a cell would end it."""
    titles = list(head)
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [titles, ["---"] * len(titles), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def first_lines(documented: object) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join(inspect.cleandoc(documented.__doc__ or "").partition("\n\n")[0].split())
