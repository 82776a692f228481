"""The screen of `runs watch`: a `RunSnapshot` laid out for a terminal of any size, without wrapped or lost lines."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from protofed.common.errors import count
from protofed.deploy.operator.snapshot import (
    FAILED,
    Attempt,
    Attention,
    Problem,
    RunSnapshot,
    ScoreSnapshot,
    SiteSnapshot,
    TimeRemaining,
)
from protofed.deploy.run_view import (
    NOISE_KEEPS,
    NOT_IN_A_SUM,
    aggregated_sentence,
    best_sentence,
    kept_sentence,
    score_text,
    warning_lines,
)
from protofed.deploy.tables import SCREEN, STYLES, Column, span, styled, terminal

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
    columns = [
        Column[SiteSnapshot]("site", lambda site: _name(site.site, width)),
        Column[SiteSnapshot]("round", lambda site: styled(site.task_status or "–")),
    ]
    if width >= NARROW:
        columns += MOVING
    if width >= WIDE and any(site.telemetry for site in sites):
        columns += [Column("does", lambda site: _activity(site, width // 3)), MACHINE]
    else:
        columns.append(Column("does", _activity, wraps=True))
    table = terminal(columns, sites[:most], SCREEN)
    return [table, *_left_out(sites[most:])]


def _left_out(sites: Sequence[SiteSnapshot]) -> list[RenderableType]:
    if not sites:
        return []
    unwell = sum(site.care in (Attention.BAD, Attention.HELD) for site in sites)
    return [_cut(f"and {len(sites)} more" + (f", {unwell} of them not well" if unwell else " that are well"), "dim")]


def _activity(site: SiteSnapshot, most: int | None = None) -> Text:
    """What the site does or, if its task of the round failed, the reason; in `most` characters."""
    if site.task_status in FAILED and site.reason and site.status in ("working", "idle"):
        text = _cut(site.reason, STYLES[site.task_status])
    else:
        text = _cut(site.doing, STYLES.get(site.status, "") if site.care < Attention.AWAITED else "")
    if most is not None:
        text.truncate(most, overflow="ellipsis")
    return text


MOVING: Sequence[Column[SiteSnapshot]] = (
    Column("task", lambda site: "" if site.progress is None else bar(site.progress, 8)),
    Column("progress", lambda site: "" if site.still_s is None else f"{span(site.still_s)} ago"),
    Column("moved", lambda site: decimal(site.bytes_moved) if site.bytes_moved else ""),
)
MACHINE = Column[SiteSnapshot]("machine", lambda site: _cut(machine_line(site.telemetry)), wraps=True)


def _problems(problems: Sequence[Problem], width: int) -> RenderableType:
    columns: Sequence[Column[Problem]] = (
        Column("what went wrong", lambda one: f"round {one.round}" + (f", try {one.attempt}" * (one.attempt > 1))),
        Column("site", lambda one: _name(one.site or "all", width)),
        Column("what", lambda one: styled(one.what)),
        Column("why", lambda one: _cut(one.reason), wraps=True),
    )
    return terminal(columns, problems, SCREEN)


def _scores(snapshot: RunSnapshot, most: int, width: int) -> RenderableType:
    name = Column[ScoreSnapshot](
        f"scores after round {snapshot.scored_round}", lambda score: _cut(score.name), wraps=True
    )
    columns = [column for column in SCORES if column.head != "std" or width >= NARROW]
    return terminal([name, *columns], snapshot.scores[:most], SCREEN)


def _number(value: float | None) -> str:
    return NOT_IN_A_SUM if value is None else score_text(value)


SCORES: Sequence[Column[ScoreSnapshot]] = (
    Column("mean", lambda score: _number(score.mean)),
    Column("change", lambda score: _change(score.mean_change, score)),
    Column("std", lambda score: _number(score.std)),
    Column("worst", lambda score: _number(score.worst)),
    Column("change", lambda score: _change(score.worst_change, score)),
    Column("sites", lambda score: str(score.sites)),
)


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


def _cut(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _name(site: str, width: int) -> Text:
    """A site's name, cut to a fifth of the screen so that long names leave the other columns their space."""
    text = Text(site)
    text.truncate(max(12, width // 5), overflow="ellipsis")
    return text


WIDEST_BAR = 40  # characters


def header(snapshot: RunSnapshot, width: int) -> list[Text]:
    """The header's lines; rich cuts each at the width."""
    lines = [_title(snapshot), _rounds(snapshot, width), _phase(snapshot), _time(snapshot)]
    lines += [Text(line, "bold yellow") for line in warning_lines(snapshot.model_warnings)]
    lines += [*_progress(snapshot, width), *_about_scores(snapshot, width)]
    if snapshot.trouble:
        lines.append(Text(no_answer(snapshot), "bold red"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def _progress(snapshot: RunSnapshot, width: int) -> list[Text]:
    """What the run waits for, which settings are not met, and why it ended."""
    lines = []
    if snapshot.queue:
        lines.append(Text(snapshot.queue, "yellow"))
    if snapshot.waiting is not None and snapshot.waiting.blocked:
        lines += _wrapped(snapshot.waiting.sentence, "bold yellow", width)
    elif snapshot.waiting is not None and snapshot.waiting.reason == "sum":  # no column says who is asked for the step
        lines += _wrapped(snapshot.waiting.sentence, "dim", width)
    for warning in snapshot.unmet:
        lines += _wrapped(f"warning: {warning}", "yellow", width)
    if snapshot.ended and snapshot.reason not in ("", snapshot.status):
        lines.append(Text(snapshot.reason, "bold red" if snapshot.status == "failed" else ""))
    return lines


def _about_scores(snapshot: RunSnapshot, width: int) -> list[Text]:
    """The best round, which scores are from a secure aggregation, and which ones sites do not send."""
    lines = []
    if snapshot.best is not None:
        lines += _wrapped(best_sentence(snapshot.best), "dim", width)
    if aggregated := [score.sites for score in snapshot.scores if score.worst is None]:
        lines.append(Text(aggregated_sentence(max(aggregated)), "dim"))
    if snapshot.noisy:
        lines += _wrapped(NOISE_KEEPS, "dim", width)
    elif snapshot.keeping:
        lines.append(Text(kept_sentence(snapshot.keeping), "dim"))
    return lines


def _wrapped(text: str, style: str, width: int) -> list[Text]:
    """A sentence on as many lines as it needs: its end names the sites."""
    return [Text(line, style) for line in textwrap.wrap(text, max(20, width))]


def bar(share: float, width: int) -> Text:
    """A share (0 to 1) as a bar of `width` characters; two kinds of line keep it readable without colours."""
    full = round(max(0.0, min(1.0, share)) * width)
    return Text.assemble(("━" * full, "green"), ("─" * (width - full), "dim"))


def no_answer(snapshot: RunSnapshot) -> str:
    """The line for a server that does not answer."""
    return f"no answer for {span(snapshot.silent_s)}, trying again; {snapshot.trouble}"


def time_left(estimate: TimeRemaining) -> str:
    """The time that a run has left, with its range and the number of rounds that it is estimated from."""
    likely, least, most = span(estimate.likely), span(estimate.least), span(estimate.most)
    between = "" if least == most else f"{least} to {most} "
    return f"about {likely} more ({between}by the last {count(estimate.by_rounds, 'round')})"


def _title(snapshot: RunSnapshot) -> Text:
    text = Text.assemble((snapshot.run, "bold"), f" · {snapshot.method} · ", styled(snapshot.status))
    if snapshot.degraded:
        text.append(f" · {count(snapshot.degraded, 'round')} degraded", "yellow")
    if snapshot.abandoned:
        text.append(f" · {count(snapshot.abandoned, 'attempt')} abandoned", "red")
    if snapshot.rolled_back:
        text.append(f" · {count(snapshot.rolled_back, 'attempt')} rolled back", "dim")
    return text


def _rounds(snapshot: RunSnapshot, width: int) -> Text:
    text = Text(f"round {snapshot.round} of {snapshot.rounds} ")
    tail = f" {snapshot.done} done"
    room = min(WIDEST_BAR, width - len(text) - len(tail))
    if room >= 5:
        text.append_text(bar(snapshot.done / max(1, snapshot.rounds), room))
    return text.append(tail)


def _phase(snapshot: RunSnapshot) -> Text:
    text = Text()
    if not snapshot.ended:
        text.append(snapshot.phase)
        text.append("" if snapshot.phase_s is None else f" for {span(snapshot.phase_s)}")
        text.append("" if snapshot.deadline_s is None else f" of at most {span(snapshot.deadline_s)}")
        text.append(" · ")
    text.append(f"{snapshot.reported} of {snapshot.invited} sites reported")
    return text.append(f" · {decimal(snapshot.received_bytes)} received, {decimal(snapshot.sent_bytes)} sent")


def _time(snapshot: RunSnapshot) -> Text:
    if snapshot.seconds is None:
        return Text("no round was opened yet")
    text = Text(f"{span(snapshot.seconds)} so far")
    if snapshot.ended:
        return Text(f"took {span(snapshot.seconds)}")
    if snapshot.rest is not None:
        return text.append(f" · {time_left(snapshot.rest)}")
    return text.append(" · paused" if snapshot.status == "paused" else " · too early to say how long it will take")


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


_WORDS: Final[Mapping[str, Callable[[float], str]]] = {  # the most important first: a screen cuts the end
    "gpu_memory_bytes": lambda value: f"GPU {decimal(int(value))}",
    "step_seconds": lambda value: f"{value:.3g} s a step",
    "policy_refusals": lambda value: f"{value:.0f} refused by policy",
    "disk_free_bytes": lambda value: f"disk {decimal(int(value))} free",
    "bytes_released": lambda value: f"{decimal(int(value))} released",
}


def machine_line(telemetry: Mapping[str, float]) -> str:
    """All numbers in a line, without zeros and without names that this version does not know."""
    return " · ".join(render(telemetry[name]) for name, render in _WORDS.items() if telemetry.get(name))
