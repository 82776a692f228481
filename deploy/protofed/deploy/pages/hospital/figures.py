"""What the hospital's pages draw: own scores, bytes that were sent by part, and privacy spent.

All is readable in black and white. A filled mark left the site, a half-filled one in a secure aggregation alone, a
hollow one stayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from rich.filesize import decimal

from protofed.common.errors import count, short
from protofed.common.protocol.scores import LOSS, lower_is_better
from protofed.deploy.pages.pictures import Sketch
from protofed.deploy.plots import COLOURS, grid, panels
from protofed.deploy.report.document import thinned
from protofed.deploy.run_view import score_text
from protofed.deploy.site.own_scores import ScoresView
from protofed.deploy.tables import Row, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from protofed.deploy.pages.hospital.site import PrivacyPoint
    from protofed.deploy.site.privacy import PrivacySpent

# By a score's prefix, the panel that it is in: of one model on one test set, so that its lines can be compared.
PANELS: Final[Mapping[str, str]] = {
    "personal": "This site's own model, on the shared test set",
    "personal.local": "This site's own model, on its own test images",
    "global.local": "The common model, on this site's test images",
}
# What is drawn of each; the others are in the table.
MEASURES: Final[Mapping[str, str]] = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "pm_v": "PM(V)",
    "pm_l": "PM(L)",
    "auroc": "AUROC",
    "average_precision": "average precision",
    "sensitivity": "sensitivity",
}
ERROR: Final = "mae"
MARKERS: Final = "o^sDvPX"
HATCHES: Final = ("", "////", "....", "xxxx", "\\\\\\\\", "++++")
MAX_MARKS, MAX_BARS, MAX_RUNS, MAX_PARTS = 24, 40, 15, 6
OTHER: Final = "other parts"


def scores_sketch(table: ScoresView, majority: Mapping[str, float]) -> Sketch | None:
    """Own scores over the rounds, a panel for each model and test set; None: there is nothing to draw.

    Args:
        majority: by the prefix of scores, the accuracy of always naming the commonest class, where it is known.
    """
    by_panel = {prefix: names for prefix in PANELS if (names := _drawn_names(table, prefix))}
    by_panel |= {name: [name] for prefix in PANELS if (name := f"{prefix}.{ERROR}") in table.names}
    if LOSS in table.names:
        by_panel[LOSS] = [LOSS]
    if not by_panel:
        return None

    def draw(width: float) -> Figure:
        columns = min(len(by_panel), 2 if width > 5 else 1)
        rows = -(-len(by_panel) // columns)
        figure = Figure(figsize=(width, 3.4 * rows), layout="constrained")
        for axes, (prefix, names) in zip(panels(figure, rows, columns, len(by_panel)), by_panel.items(), strict=True):
            _score_panel(axes, table, prefix, names, majority.get(prefix))
        return figure

    lines = [_first_and_last(table, name) for names in by_panel.values() for name in names]
    lines += [f"always the commonest class: {majority[of]:.1%} of {of}.accuracy" for of in by_panel if of in majority]
    summary = "; ".join(lines)
    title = "This site's own scores over the rounds"
    return Sketch(
        title,
        f"{summary}. Filled marks: sent scores. Half filled: sent only in a secure aggregation. Hollow: not sent.",
        draw,
    )


def by_run_sketch(parts: Mapping[tuple[str, str], int]) -> Sketch | None:
    """Bytes of updates by run and part, as (run, part) -> bytes; None: none was sent.

    The last run is the newest.
    """
    runs = list(dict.fromkeys(run for run, _ in parts))[-MAX_RUNS:]
    bars = {run or "no run": {part: size for (of, part), size in parts.items() if of == run} for run in runs}
    if not bars:
        return None
    largest = max(bars, key=lambda run: sum(bars[run].values()))
    description = (
        f"Bytes of updates of {count(len(bars), 'run')}, by part. The most of run {short(largest, 40)}: "
        f"{_listed(bars[largest])}."
    )
    return Sketch("Bytes sent in updates, by run and part", description, lambda width: _flat_bars(bars, width))


def by_round_sketch(run: str, parts: Mapping[int, Mapping[str, int]]) -> Sketch | None:
    """Bytes of a run's updates by round and part; None: none was sent."""
    rounds = sorted(number for number, of in parts.items() if of and number)  # 0: the first model, of nobody's data
    if not rounds:
        return None
    width = -(-(rounds[-1] - rounds[0] + 1) // MAX_BARS)  # rounds of one bar
    bars: dict[str, dict[str, int]] = {}
    for number in rounds:
        first = rounds[0] + (number - rounds[0]) // width * width
        bar = bars.setdefault(str(first) if width == 1 else f"{first}–{first + width - 1}", {})
        for part, size in parts[number].items():
            bar[part] = bar.get(part, 0) + size
    total: dict[str, int] = {}
    for bar in bars.values():
        for part, size in bar.items():
            total[part] = total.get(part, 0) + size
    description = f"Rounds {rounds[0]} to {rounds[-1]}, together {_listed(total)}."
    names = _parts(bars.values())
    rows: list[Row] = [[bar, *(f"{of.get(part, 0):,}" for part in names)] for bar, of in bars.items()]
    numbers = Table("Bytes, as announced", ["round" if width == 1 else "rounds", *names], rows)
    title = f"Bytes sent in updates of {short(run, 40)}, by part"
    return Sketch(title, description, lambda width: _standing_bars(bars, width), numbers)


def privacy_sketch(points: Sequence[PrivacyPoint], spent: PrivacySpent) -> Sketch:
    """Epsilon over the fits, with the budget as a line where there is one."""
    known = [(point.fit, point.epsilon) for point in points if point.epsilon is not None]

    def draw(width: float) -> Figure:
        figure = Figure(figsize=(width, 2.9), layout="constrained")
        axes = figure.add_subplot()
        fits, values = [0, *(fit for fit, _ in known)], [0.0, *(value for _, value in known)]
        axes.plot(fits, values, color=COLOURS[0], linewidth=1.6, marker="o" if len(known) <= MAX_MARKS else None, ms=4)
        if spent.budget is not None:
            axes.axhline(spent.budget, color=COLOURS[1], linewidth=1.4, linestyle="--")
            axes.annotate(
                f"budget, {spent.budget:g}", (0, spent.budget), (3, 3), textcoords="offset points", fontsize=8
            )
            axes.set_ylim(0, 1.12 * max(spent.budget, *values))
        axes.set_ylim(bottom=0)
        axes.set_ylabel("ε", rotation=0, labelpad=8)
        _count_axis(axes, "fits, of all runs")
        return figure

    budget = "without a budget" if spent.budget is None else f"of {spent.budget:g} for each {spent.unit}"
    last = f"{known[-1][1]:.3g} after fit {known[-1][0]}" if known else "beyond all use"
    rows = [
        [f"{p.fit}", p.run, f"{p.round}", p.at, "beyond all use" if p.epsilon is None else f"{p.epsilon:.3g}"]
        for p in points
    ]
    numbers = Table(f"Epsilon at delta {spent.delta:g}", ["fit", "run", "round", "when (UTC)", "epsilon"], rows, 4)
    return Sketch("Privacy spent over the fits", f"Epsilon {last}, {budget}, at delta {spent.delta:g}.", draw, numbers)


def _drawn_names(table: ScoresView, prefix: str) -> list[str]:
    return [name for measure in MEASURES if (name := f"{prefix}.{measure}") in table.names]


def _score_panel(axes: Axes, table: ScoresView, prefix: str, names: Sequence[str], majority: float | None) -> None:
    share = prefix in PANELS
    for place, name in enumerate(names):
        rounds = [scored for scored in table.rounds if name in scored.scores]
        at = [scored.round for scored in rounds]
        values = [scored.scores[name] * (100 if share else 1) for scored in rounds]
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        label = MEASURES.get(name.rpartition(".")[2], name)
        axes.plot(at, values, color=colour, linewidth=1.3, label=label, marker=marker, ms=4.5, markevery=[])
        for number in thinned(range(len(at)), MAX_MARKS):
            look = _mark(table, name, at[number], colour)
            axes.plot(at[number], values[number], marker, ms=4.5, color=colour, zorder=3, **look)
    if majority is not None:
        axes.axhline(100 * majority, color="0.35", linewidth=1.2, linestyle="--", label="always the commonest class")
    if share:
        axes.set_ylim(0, 104)
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("%" if share else "", rotation=0, labelpad=8)
    of = PANELS.get(prefix.removesuffix(f".{ERROR}"))
    title = "Mean loss in training" if of is None else of if share else f"{of}: mean absolute error"
    axes.set_title(title, fontsize=9)
    _count_axis(axes, "round")
    if share:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=8)


def _mark(table: ScoresView, name: str, round: int, colour: str) -> dict[str, Any]:
    """How a score's mark is filled, by whether it left."""
    if name in table.sent.names.get(round, ()):
        return {"mfc": colour}
    if name in table.sent.aggregated.get(round, ()):
        return {"mfc": colour, "mfcalt": "white", "fillstyle": "bottom"}
    return {"mfc": "white"}


def _flat_bars(bars: Mapping[str, Mapping[str, int]], width: float) -> Figure:
    figure = Figure(figsize=(width, 1.3 + 0.32 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(bars))
    for part, look, sizes, before in _stacked(bars):
        axes.barh(places, sizes, 0.7, before, label=part, **look)
    axes.set_yticks(places, [short(run, 20 if width > 5 else 14) for run in bars], fontsize=8)
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(5 if width > 5 else 3))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: decimal(int(size))))
    grid(axes, "x")
    figure.legend(loc="outside upper left", ncols=5 if width > 5 else 2, fontsize=8)
    return figure


def _standing_bars(bars: Mapping[str, Mapping[str, int]], width: float) -> Figure:
    figure = Figure(figsize=(width, 2.9), layout="constrained")
    axes = figure.add_subplot()
    for part, look, sizes, before in _stacked(bars):
        axes.bar(range(len(bars)), sizes, 0.8, before, label=part, **look)
    ticks = range(0, len(bars), -(-len(bars) // (14 if width > 5 else 6)))
    axes.set_xticks(ticks, [list(bars)[place] for place in ticks], fontsize=8)
    axes.set_xlabel("round")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: decimal(int(size))))
    grid(axes)
    figure.legend(loc="outside upper left", ncols=5 if width > 5 else 2, fontsize=8)
    return figure


def _stacked(bars: Mapping[str, Mapping[str, int]]) -> list[tuple[str, dict[str, Any], list[int], list[int]]]:
    """By part: its look, its bytes in each bar, and where these begin."""
    names = _parts(bars.values())
    parts = names if len(names) <= MAX_PARTS else [*names[: MAX_PARTS - 1], OTHER]
    sizes = {part: [of.get(part, 0) for of in bars.values()] for part in parts}
    if OTHER in sizes:
        sizes[OTHER] = [sum(of.get(part, 0) for part in names[MAX_PARTS - 1 :]) for of in bars.values()]
    tops = list(accumulate(sizes.values(), lambda below, more: [a + b for a, b in zip(below, more, strict=True)]))
    begins = [[0] * len(bars), *tops]
    looks: list[dict[str, Any]] = [
        {"color": COLOURS[place % len(COLOURS)], "hatch": HATCHES[place], "edgecolor": "white", "linewidth": 0.5}
        for place in range(len(parts))
    ]
    return [(part, looks[place], sizes[part], begins[place]) for place, part in enumerate(parts)]


def _parts(bars: Any) -> list[str]:
    """The parts of all bars, the largest first."""
    total: dict[str, int] = {}
    for bar in bars:
        for part, size in bar.items():
            total[part] = total.get(part, 0) + size
    return sorted(total, key=lambda part: (-total[part], part))


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{part} {decimal(size)}" for part, size in sorted(sizes.items(), key=lambda item: -item[1]))


def _first_and_last(table: ScoresView, name: str) -> str:
    rounds = [scored for scored in table.rounds if name in scored.scores]
    form = partial(score_text, digits=3) if lower_is_better(name) else "{:.1%}".format
    ends = [f"{form(scored.scores[name])} in round {scored.round}" for scored in (rounds[0], rounds[-1])]
    sent = sum(name in table.sent.names.get(scored.round, ()) for scored in rounds)
    aggregated = sum(name in table.sent.aggregated.get(scored.round, ()) for scored in rounds)
    words = [f"{_of(sent, len(rounds))} sent"] if sent else []
    words += [f"{_of(aggregated, len(rounds))} sent in a secure aggregation"] if aggregated else []
    return f"{name}: {ends[0]}, {ends[1]}, {', '.join(words) or 'all stayed'}"


def _of(part: int, every: int) -> str:
    return "all" if part == every else f"{part} of {every}"


def _count_axis(axes: Axes, label: str) -> None:
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    grid(axes)
    axes.margins(x=0.03)
