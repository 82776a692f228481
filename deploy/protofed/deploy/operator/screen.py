"""The screen of `runs watch`: a `RunSnapshot` laid out for a terminal of any size, without wrapped or lost lines."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from protofed.deploy.console.run_words import NOT_IN_A_SUM
from protofed.deploy.operator.screen_header import bar, header
from protofed.deploy.operator.screen_layout import Rows, fitting
from protofed.deploy.operator.snapshot import (
    FAILED,
    Attempt,
    Attention,
    Problem,
    RunSnapshot,
    ScoreSnapshot,
    SiteSnapshot,
)
from protofed.deploy.operator.telemetry import machine_line
from protofed.deploy.tables import STYLES, span, styled

NARROW, WIDE = 60, 110  # terminal columns below which a site's bar is left out, and from which telemetry is shown
STRIP_CELL, STRIP_LABEL = 11, 10  # columns


class WatchScreen:
    """A snapshot as a rich renderable.

    Args:
        height: lines of the terminal; None: all of the snapshot, however long.
    """

    def __init__(self, snapshot: RunSnapshot, height: int | None = None) -> None:
        self._snapshot, self._height = snapshot, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(*parts(self._snapshot, options.max_width, self._height))


def parts(snapshot: RunSnapshot, width: int, height: int | None = None) -> list[RenderableType]:
    """The screen from its top: header, sites, problems, scores, the last rounds; `width` and `height` in characters."""
    top = header(snapshot, width)
    available = Rows(
        len(snapshot.sites), len(snapshot.problems), len(snapshot.scores), len(_strip_rows(snapshot.history))
    )
    rows = fitting(available, None if height is None else height - len(top))
    sections: list[list[RenderableType]] = [
        _sites(snapshot.sites, rows.sites, width),
        [_problems(snapshot.problems[: rows.problems], width)] if rows.problems else [],
        [_scores(snapshot, rows.scores, width)] if rows.scores else [],
        [_strip(snapshot.history, width)] if rows.strip else [],
    ]
    gap: list[RenderableType] = [Text()] if rows.gaps else []
    return [*top, *(line for section in sections if section for line in (*gap, *section))]


def _sites(sites: Sequence[SiteSnapshot], most: int, width: int) -> list[RenderableType]:
    if not most:
        return []
    columns = ["task", "progress", "moved"] if width >= NARROW else []
    machine = width >= WIDE and any(site.telemetry for site in sites)
    last = ["does", "machine"] if machine else ["does"]
    table = _table("site", "round", *columns, *last, cut=last[-1])
    for site in sites[:most]:
        still = "" if site.still_s is None else f"{span(site.still_s)} ago"
        moved = decimal(site.bytes_moved) if site.bytes_moved else ""
        cells = [_progress_bar(site), Text(still), Text(moved)][: len(columns)]
        activity = _activity(site)
        if machine:
            activity.truncate(width // 3, overflow="ellipsis")
            cells.append(activity)
        table.add_row(
            _name(site.site, width), styled(site.task_status or "–"), *cells, _machine(site) if machine else activity
        )
    return [table, *_left_out(sites[most:])]


def _left_out(sites: Sequence[SiteSnapshot]) -> list[RenderableType]:
    if not sites:
        return []
    unwell = sum(site.care in (Attention.BAD, Attention.HELD) for site in sites)
    return [_cut(f"and {len(sites)} more" + (f", {unwell} of them not well" if unwell else " that are well"), "dim")]


def _activity(site: SiteSnapshot) -> Text:
    """What the site does or, if its task of the round failed, the reason."""
    if site.task_status in FAILED and site.reason and site.status in ("working", "idle"):
        return _cut(site.reason, STYLES[site.task_status])
    return _cut(site.doing, STYLES.get(site.status, "") if site.care < Attention.AWAITED else "")


def _progress_bar(site: SiteSnapshot) -> Text:
    return Text() if site.progress is None else bar(site.progress, 8)


def _machine(site: SiteSnapshot) -> Text:
    return _cut(machine_line(site.telemetry))


def _problems(problems: Sequence[Problem], width: int) -> RenderableType:
    table = _table("what went wrong", "site", "what", "why", cut="why")
    for problem in problems:
        where = f"round {problem.round}" + (f", try {problem.attempt}" if problem.attempt > 1 else "")
        table.add_row(Text(where), _name(problem.site or "all", width), styled(problem.what), _cut(problem.reason))
    return table


def _scores(snapshot: RunSnapshot, most: int, width: int) -> RenderableType:
    std = ["std"] if width >= NARROW else []
    first = f"scores after round {snapshot.scored_round}"
    table = _table(first, "mean", "change", *std, "worst", "change", "sites", cut=first)
    for score in snapshot.scores[:most]:
        mean, spread, worst = (
            Text(NOT_IN_A_SUM) if value is None else Text(f"{value:.4f}")
            for value in (score.mean, score.std, score.worst)
        )
        changes = _change(score.mean_change, score), _change(score.worst_change, score)
        cells = [mean, changes[0], *([spread] if std else []), worst, changes[1], Text(str(score.sites))]
        table.add_row(_cut(score.name), *cells)
    return table


def _change(by: float | None, score: ScoreSnapshot) -> Text:
    """A change, green if for the better; dim if it would round to zero in four decimals."""
    if by is None:
        return Text("")
    better = (by < 0) if score.lower_is_better else (by > 0)
    return Text(f"{by:+.4f}", "dim" if abs(by) < 5e-5 else "green" if better else "red")


def _strip(history: Sequence[Attempt], width: int) -> RenderableType:
    """The newest attempts from left to right."""
    newest = history[-max(1, (width - STRIP_LABEL) // (STRIP_CELL + 1)) :]
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=STRIP_LABEL, no_wrap=True, style="dim")
    for _ in newest:
        table.add_column(width=STRIP_CELL, no_wrap=True, overflow="ellipsis")
    for label, cells in _strip_rows(history).items():
        table.add_row(label, *cells[-len(newest) :])
    return table


def _strip_rows(history: Sequence[Attempt]) -> dict[str, list[Text]]:
    if not history:
        return {}
    rows = {
        "round": [Text(f"{row.round}" + (f", try {row.attempt}" if row.attempt > 1 else "")) for row in history],
        "outcome": [styled(row.outcome) for row in history],
        "took": [Text("" if row.seconds is None else f"{row.seconds:.1f} s") for row in history],
        "reported": [Text(f"{row.reported} of {row.invited}") for row in history],
    }
    return {**rows, "failed": [_failed(row) for row in history]} if any(row.failed for row in history) else rows


def _failed(row: Attempt) -> Text:
    """The failed tasks of an attempt: `1 late`; of several kinds only their number."""
    total, kinds = sum(row.failed.values()), list(row.failed)
    return Text(f"{total} {kinds[0] if len(kinds) == 1 else 'failed'}" if total else "", "red")


def _table(*columns: str, cut: str) -> Table:
    """A table with one line a row; if the terminal is too narrow, the column `cut` is shortened."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(Text(column, no_wrap=True, overflow="ellipsis"), no_wrap=column != cut, overflow="ellipsis")
    return table


def _cut(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _name(site: str, width: int) -> Text:
    """A site's name, cut to a fifth of the screen so that long names leave the other columns their space."""
    text = Text(site)
    text.truncate(max(12, width // 5), overflow="ellipsis")
    return text
