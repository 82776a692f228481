"""What `doctor` found, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from protofed.deploy.doctor.checks import CheckRow, State, first, verdict

MARKS = {State.FINE: "✓", State.WARNING: "!", State.FINDING: "✗", State.SKIPPED: "–"}
STYLES = {State.FINE: "green", State.WARNING: "yellow", State.FINDING: "bold red", State.SKIPPED: "dim"}


def table(rows: Sequence[CheckRow]) -> RenderableType:
    """A row a check; a finding's name before what was seen, and below it what to do."""
    shown = Table(box=None, show_header=False, pad_edge=False)
    shown.add_column(no_wrap=True)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for row in rows:
        shown.add_row(Text(MARKS[row.state], style=STYLES[row.state]), row.check, _told(row))
    return shown


def plain(rows: Sequence[CheckRow], *, strict: bool) -> dict[str, Any]:
    """As JSON has it."""
    worst = first(rows, strict=strict)
    return {
        "verdict": verdict(rows, strict=strict),
        "exit_code": 0 if worst is None else worst.code,
        "checks": [_plain(row) for row in rows],
    }


def _told(row: CheckRow) -> Text:
    if row.diagnosis is None:
        return Text(row.seen, style="dim" if row.state is State.SKIPPED else "")
    told = Text.assemble((row.diagnosis.name, STYLES[row.state]), f": {row.seen}")
    return told.append(f"\n→ {row.diagnosis.remedy}", style="bold")


def _plain(row: CheckRow) -> dict[str, Any]:
    told: dict[str, Any] = {"check": row.check, "state": row.state.value, "seen": row.seen}
    if row.diagnosis is not None:
        told |= {"finding": row.diagnosis.name, "code": row.diagnosis.code, "remedy": row.diagnosis.remedy}
    return told
