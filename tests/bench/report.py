"""Rows of `make bench`, each a figure and its goal: as a table, as JSON, compared with an earlier JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        what: the same in every run: a comparison finds the row by it.
        figure: the measurement; None: not measured, `note` says why.
        unit: of `figure` and `beside`, such as s or MB.
        beside: the same, of what it is measured against in this run.
        beside_what: what that is.
        ratio: of the two, as a goal has it; None: the goal is about `figure`.
        at_most, at_least: the goal; both None: there is none.
        command: measures this row alone.
        note: a few words for the table.
        details: for the JSON only.
    """

    what: str
    figure: float | None
    unit: str = ""
    beside: float | None = None
    beside_what: str = ""
    ratio: float | None = None
    at_most: float | None = None
    at_least: float | None = None
    command: str = ""
    note: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def compared(self) -> float | None:
        """What goal and earlier runs are compared with: the ratio, which machine and load move least, or the figure."""
        return self.figure if self.ratio is None else self.ratio

    @property
    def reached(self) -> bool | None:
        """Whether the goal is; None: there is no goal, or nothing was measured."""
        if self.compared is None or (self.at_most is None and self.at_least is None):
            return None
        least, most = self.at_least, self.at_most
        return (most is None or self.compared <= most) and (least is None or self.compared >= least)


def seconds(work: Callable[[], object]) -> float:
    """How long it takes, on the clock."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def table(rows: Iterable[Row], title: str, earlier: Mapping[str, Row] | None = None) -> Table:
    """The rows for people; with `earlier`, by `Row.what`, a column of how each compares with that run."""
    told = Table(title=title, title_justify="left")
    for name in ("what", "measured", "beside", "ratio", "goal", *(() if earlier is None else ("now/then",))):
        told.add_column(name, overflow="fold")
    for row in rows:
        then = () if earlier is None else (_number(change(row, earlier.get(row.what))),)
        told.add_row(row.what, _measured(row), _beside(row), _number(row.ratio), _goal(row), *then)
    return told


def change(now: Row, then: Row | None) -> float | None:
    """What is compared of a row, over that of an earlier run; None: one of them was not measured."""
    if then is None or now.compared is None or not then.compared:
        return None
    return now.compared / then.compared


def write(path: Path, rows: Sequence[Row], machine: Mapping[str, Any]) -> None:
    """Write rows, and where they were measured, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": dict(machine), "rows": [asdict(row) | {"reached": row.reached} for row in rows]}
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Row]:
    """The rows of an earlier run by `Row.what`; fields that this version does not know are left out."""
    known = {one.name for one in fields(Row)}
    rows = [
        Row(**{key: value for key, value in row.items() if key in known})
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
    ]
    return {row.what: row for row in rows}


def _measured(row: Row) -> str:
    figure = "–" if row.figure is None else f"{_number(row.figure)} {row.unit}".strip()
    return f"{figure}; {row.note}" if row.note else figure


def _beside(row: Row) -> str:
    return " ".join(part for part in (row.beside_what, _number(row.beside), row.beside and row.unit) if part)


def _goal(row: Row) -> str:
    goals = [f"≤ {_number(row.at_most)}"] * (row.at_most is not None)
    goals += [f"≥ {_number(row.at_least)}"] * (row.at_least is not None)
    mark = {True: " reached", False: " MISSED", None: ""}[row.reached]
    return " and ".join(goals) + mark if goals else ""


def _number(value: float | None) -> str:
    """Three digits that say something."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
