"""The output of `doctor`: a table for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from protofed.deploy.doctor.checks import CheckRow, State, first_finding, verdict
from protofed.deploy.tables import LIST, Column, terminal

MARKS = {State.FINE: "✓", State.WARNING: "!", State.FINDING: "✗", State.SKIPPED: "–"}
STYLES = {State.FINE: "green", State.WARNING: "yellow", State.FINDING: "bold red", State.SKIPPED: "dim"}


def table(rows: Sequence[CheckRow]) -> RenderableType:
    """One row a check: mark, name, message; a finding also has its diagnosis and the remedy."""
    mark = Column[CheckRow]("", lambda row: Text(MARKS[row.state], style=STYLES[row.state]))
    return terminal((mark, Column("", lambda row: row.check), Column("", _message, wraps=True)), rows, LIST)


def plain(rows: Sequence[CheckRow], *, strict: bool) -> dict[str, Any]:
    """The output of `--json`: `verdict`, `exit_code` and `checks`."""
    worst = first_finding(rows, strict=strict)
    return {
        "verdict": verdict(rows, strict=strict),
        "exit_code": 0 if worst is None else worst.code,
        "checks": [_plain(row) for row in rows],
    }


def _message(row: CheckRow) -> Text:
    # `Text`, not markup: messages contain paths and library errors, in which rich would read [x] as a style.
    if row.diagnosis is None:
        return Text(row.message, style="dim" if row.state is State.SKIPPED else "")
    text = Text.assemble((row.diagnosis.name, STYLES[row.state]), f": {row.message}")
    return text.append(f"\n→ {row.diagnosis.remedy}", style="bold")


def _plain(row: CheckRow) -> dict[str, Any]:
    fields: dict[str, Any] = {"check": row.check, "state": row.state.value, "seen": row.message}
    if row.diagnosis is not None:
        fields |= {"finding": row.diagnosis.name, "code": row.diagnosis.code, "remedy": row.diagnosis.remedy}
    return fields
