"""Tables: declared once, by their columns or as rows of text, and shown on a terminal, in Markdown or in HTML."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Generic, Literal, TypeAlias, TypeVar

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table as TerminalTable
from rich.text import Text

R = TypeVar("R")
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
    "rejected": "red",
    "refused": "red",
    "away": "yellow",
}
MAX_STACKED = 8  # columns of a table whose rows become cards on a narrow screen


@dataclass(frozen=True)
class Column(Generic[R]):
    """A column on a terminal, and how its cells are made.

    Attributes:
        cell: of a row; text as it is, for rich would take brackets in a site's or an operator's words for markup.
        right: numbers are aligned to the right.
        wraps: it may break lines; the others are as wide as their content, so that words and numbers stay whole.
        width: characters that it has at least.
        overflow: what becomes of a word that is too long for a narrow terminal.
    """

    head: str
    cell: Callable[[R], str | Text]
    right: bool = False
    wraps: bool = False
    width: int | None = None
    overflow: Literal["fold", "ellipsis"] = "fold"


@dataclass(frozen=True)
class TableStyle:
    """How a terminal shows tables.

    Attributes:
        boxed: with lines around cells.
        heads: the style of the header; None: there is none.
        whole: where the terminal is too narrow the line runs on: half a date would be taken for another one.
        one_line: a row is one line: what is too long is cut.
    """

    boxed: bool = False
    heads: str | None = "table.header"
    whole: bool = False
    one_line: bool = False


BOXED, OPEN, STATUS, SCREEN, LIST = (
    TableStyle(boxed=True),
    TableStyle(),
    TableStyle(heads="dim", whole=True),
    TableStyle(heads="dim", one_line=True),
    TableStyle(heads=None),
)


@dataclass(frozen=True)
class Cell:
    """A cell of a page with a class of the style sheet; `description` is its tooltip.

    A header of class `heard` is read out, and not shown.
    """

    text: str
    css_class: str = ""
    description: str = ""


Row: TypeAlias = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    """Rows of text under a header, shown in any form.

    Attributes:
        text_columns: number of leading columns with text; the others have numbers and are aligned to the right.
        folded: shown only on a click, as the numbers behind a figure are.
        css_class: a class of the style sheet.
        note: what the cells are, in sentences; shown below it.
        key: what it is, in one word, among the tables of a comparison.
    """

    caption: str
    header: Row
    rows: Sequence[Row]
    text_columns: int = 1
    folded: bool = False
    css_class: str = ""
    note: str = ""
    key: str = ""

    @property
    def stacks(self) -> bool:
        """Whether its rows become cards on a phone; a matrix or a calendar is scrolled instead."""
        return len(self.header) <= MAX_STACKED and self.css_class != "calendar"

    @property
    def texts(self) -> list[list[str]]:
        """The header and the rows, as text alone."""
        return [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in (self.header, *self.rows)]


def terminal(
    columns: Sequence[Column[R]],
    rows: Iterable[R],
    look: TableStyle = OPEN,
    title: str | None = None,
    caption: str | None = None,
) -> TerminalTable:
    """A table of one row for each of `rows`, for rich to print."""
    table = TerminalTable(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=HEAVY_HEAD if look.boxed else None,
        pad_edge=look.boxed,
        show_header=look.heads is not None,
        header_style=look.heads,
    )
    cells = [[_text(column.cell(row)) for column in columns] for row in rows]
    for place, column in enumerate(columns):
        whole = [of_row[place].cell_len for of_row in cells] if look.whole and not column.wraps else []
        overflow = "ellipsis" if look.one_line else column.overflow
        table.add_column(
            Text(column.head, no_wrap=True, overflow=overflow) if look.one_line else column.head,
            justify="right" if column.right else "left",
            overflow=overflow,
            no_wrap=not column.wraps,
            min_width=max([len(column.head), *whole]) if look.whole else column.width,
        )
    for of_row in cells:
        table.add_row(*of_row)
    return table


def show(table: Table, console: Console) -> None:
    """For people; one that is too wide is cut into several, one below the other, each with its first column."""
    first, *other_columns = zip(*table.texts, strict=True)  # each: its header, then its cells
    for part, group in enumerate(_fitting(other_columns, console.width - _width(first) - 1) if table.rows else ()):
        heads = [head for head, *_ in (first, *group)]
        chosen = [
            Column(head, itemgetter(place), right=place > 0, overflow="ellipsis") for place, head in enumerate(heads)
        ]
        rows = zip(*(column[1:] for column in (first, *group)), strict=True)
        console.print(terminal(chosen, rows, BOXED, None if part else table.caption or None))
    console.print(table.note, highlight=False, style="dim", markup=False)


def markdown(table: Table) -> str:
    """As Markdown, with its caption and its note; all but the first column are aligned to the right."""
    rows = markdown_rows(*table.texts, right=range(1, len(table.header)))
    parts = (table.caption and f"**{table.caption}**", rows if table.rows else "", table.note)
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown_rows(header: Sequence[str], *rows: Sequence[str], right: Collection[int] = ()) -> str:
    """A table alone, as Markdown; `right`: columns, by their place, that are aligned to the right."""
    first, *body = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    rule = "|".join("---:" if place in right else "---" for place in range(len(header)))
    return "\n".join([first, f"|{rule}|", *body])


def _text(cell: str | Text) -> Text:
    return Text(cell) if isinstance(cell, str) else cell


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


def styled(word: str) -> Text:
    """A status or outcome in its colour."""
    return Text(word, STYLES.get(word, ""))


def span(seconds: float) -> str:
    """A duration in the largest unit that gives at least 2: `119 s`, `2 min`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def printable(text: str) -> str:
    """Text from a site or another operator, without control characters: a terminal would obey them."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
