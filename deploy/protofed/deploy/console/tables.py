"""Building blocks of the operator's tables: colours of status words, durations, cells of plain text."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

STYLES = {
    "running": "cyan",
    "completed": "green",
    "failed": "bold red",
    "aborted": "yellow",
    "paused": "yellow",
    "degraded": "yellow",
    "abandoned": "red",
    "rolled-back": "dim",
    "excluded": "red",
    "silent": "red",
    "revoked": "red",
    "expired": "red",
    "held": "yellow",
    "same": "green",
    "different": "bold red",
    "damaged": "bold red",
    "late": "red",
    "set-aside": "red",
    "refused": "red",
    "away": "yellow",
}
# Columns that may break lines; the others are as wide as their content, so that words and numbers stay whole.
WRAPPED = ("run", "site", "tasks", "reason", "phase", "doing")


class _Plain(Table):
    """A table whose cells are plain text: rich would take brackets in a site's or an operator's words for markup."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        texts = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        for column, cell in zip(self.columns, texts, strict=False):
            if column.no_wrap and isinstance(cell, Text):
                # Where the terminal is too narrow the line runs on: half a date would be taken for another one.
                column.min_width = max(column.min_width or 0, cell.cell_len)
        super().add_row(*texts, **options)


def plain_table(*columns: str, title: str | None = None) -> Table:
    """A table without lines whose cells are folded, never cut, if the console has `soft_wrap`."""
    title = f"\n{title}" if title else None
    table = _Plain(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column not in WRAPPED, min_width=len(column))
    return table


def styled(word: str) -> Text:
    """A status or outcome in its colour."""
    return Text(word, STYLES.get(word, ""))


def span(seconds: float) -> str:
    """A duration in the largest unit of which it has at least two: `119 s`, `2 min`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def printable(text: str) -> str:
    """Text from a site or another operator, without control characters: a terminal would obey them."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
