"""A table as text: for a terminal, cut into several where it is too wide, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Grid:
    """Rows of text under a header.

    Attributes:
        key: what it is, in one word.
        rows: none: only the caption is shown.
        caption: what the cells are, in sentences.
        title: empty: it needs none.
    """

    key: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    title: str = ""


def show_grid(grid: Grid, console: Console) -> None:
    """For people; one that is too wide is cut into several, one below the other, each with its first column."""
    columns = list(zip(grid.header, *grid.rows, strict=True))  # each: its header, then its cells
    for place, group in enumerate(_fitting(columns[1:], console.width - _width(columns[0]) - 1) if grid.rows else ()):
        table = Table(title=None if place else grid.title or None, title_justify="left")
        table.add_column(columns[0][0], no_wrap=True)
        for header, *_ in group:
            table.add_column(header, justify="right", no_wrap=True)
        for cells in zip(columns[0][1:], *(column[1:] for column in group), strict=True):
            table.add_row(*cells)
        console.print(table)
    console.print(grid.caption, highlight=False, style="dim", markup=False)


def markdown_grid(grid: Grid) -> str:
    """As a Markdown table with its title and caption."""
    lines = [grid.header, ["---", *["---:"] * (len(grid.header) - 1)], *grid.rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    parts = (grid.title and f"**{grid.title}**", table if grid.rows else "", grid.caption)
    return "\n\n".join(part for part in parts if part) + "\n"


def _fitting(columns: Sequence[tuple[str, ...]], width: int) -> list[list[tuple[str, ...]]]:
    """The columns in groups of at most `width` characters, or of one column."""
    groups: list[list[tuple[str, ...]]] = [[]]
    for column in columns:
        if groups[-1] and sum(map(_width, [*groups[-1], column])) > width:
            groups.append([])
        groups[-1].append(column)
    return groups


def _width(column: tuple[str, ...]) -> int:
    """Characters, with the padding and the line that rich draws."""
    return max(map(len, column)) + 3
