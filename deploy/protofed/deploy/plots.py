"""Pictures: colours, frames, saving, and the charts of reports, comparisons and notebooks.

Series differ in colour and in marker or line, so they are readable in black and white.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from protofed.common.config.recipe import Recipe
from protofed.common.errors import short
from protofed.common.payload import Array
from protofed.common.storage import files

# Okabe and Ito's colours, distinguished by colour-blind readers; yellow is too pale for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLE: Any = {  # of matplotlib, for pictures in documents and pages
    "svg.fonttype": "none",  # text stays text: small, searchable, in the reader's own font
    "svg.hashsalt": "protofed",  # else matplotlib draws ids at random, and a report differs every time
    "font.size": 9,
    "axes.edgecolor": "0.4",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
WIDTH = 7.6  # inches
NAMED_CLASSES = 20  # more of them have no room for their names
MARKERS = ("o", "^", "s", "D")  # when the colours are used up
NAMES = {
    "cifar10": ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
    "fashion-mnist": ["t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"],
}


def class_names(recipe: Recipe) -> list[str]:
    """What the run calls its classes, or people those of a well-known data set; else numbers."""
    names = recipe.class_names or NAMES.get(recipe.data.source if recipe.data else "", ())
    return list(names) if len(names) == recipe.classes else [str(c) for c in range(recipe.classes)]


def class_look(c: int) -> tuple[str, str]:
    """Colour and marker of a class."""
    return COLOURS[c % len(COLOURS)], MARKERS[c // len(COLOURS) % len(MARKERS)]


def titled(height: float, title: str) -> Figure:
    """An empty picture, as wide as a page."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def bare(axes: Axes) -> None:
    """For points whose coordinates mean nothing by themselves."""
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_box_aspect(1)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color("0.8")


def framed(axes: Axes) -> None:
    """For bars and lines over percent."""
    axes.set_ylabel("%", rotation=0, labelpad=10)
    grid(axes)
    axes.spines[["top", "right"]].set_visible(False)


def scatter(axes: Axes, points: Array, labels: Array, size: float) -> None:
    """Points [N, 2] by class, in an order that hides no class behind another of its marker."""
    order = np.random.default_rng(0).permutation(len(labels))
    looks = [class_look(int(c)) for c in labels[order]]
    for marker in sorted({marker for _, marker in looks}):
        own = [place for place, look in enumerate(looks) if look[1] == marker]
        x, y = points[order][own].T
        colours = [looks[place][0] for place in own]
        axes.scatter(x, y, size, colours, marker=marker, alpha=0.55, linewidths=0, rasterized=True)


def save(figure: Figure, out: Path, name: str, *, dry_run: bool = False) -> list[Path]:
    """As .png and .svg; their paths. Equal pictures are equal files. A dry run writes none."""
    paths = [out / f"{name}.{suffix}" for suffix in ("png", "svg")]
    for path in () if dry_run else paths:
        files.write(path, rendered(figure, path.suffix[1:]), files.PUBLIC)
    return paths


def percent(values: Array | Sequence[float]) -> Array:
    """Shares of any shape [...] times 100."""
    return 100 * np.asarray(values, dtype=float)


def grid(axes: Axes, which: Literal["x", "y", "both"] = "y") -> None:
    """Pale lines below what is drawn."""
    axes.grid(axis=which, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)


def panels(figure: FigureBase, rows: int, columns: int, count: int) -> list[Axes]:
    """A grid of so many panels. Only the first ones are shown."""
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in every[count:]:
        axes.set_visible(False)
    return every[:count]


class NotebookFigure(Figure):
    """A figure that a notebook shows by itself; it knows how to show others only once pyplot was imported."""

    def _repr_png_(self) -> bytes:
        drawn = BytesIO()
        self.savefig(drawn, format="png", dpi=100)
        return drawn.getvalue()


def rendered(figure: Figure, suffix: str) -> bytes:
    """A figure as the bytes of a file; equal figures give equal bytes."""
    buffer = BytesIO()
    metadata = {"Date": None} if suffix == "svg" else {}
    with rc_context({"svg.hashsalt": "protofed"}):
        figure.savefig(buffer, format=suffix, dpi=160, metadata=metadata)
    return buffer.getvalue()


CHART_WIDTH = 8.6  # inches
LONGEST_NAME, LETTERS = 28, 90  # characters of one name on an axis, and of all before they are turned
NAMED = 24  # ticks that fit on an axis: of more classes only some are labelled
STYLES = ("-", "--", ":")  # when the colours are used up
Curve: TypeAlias = tuple[Sequence[float], NDArray[np.float64]]  # places on the axis, and values [seeds, places]
_GAP = 0.055  # between two names, as a share of the picture's height
BLUE, ORANGE, GREEN = COLOURS[0], COLOURS[1], COLOURS[2]


@dataclass(frozen=True)
class Panel:
    """A value over rounds: a line of means, with a band from the smallest to the largest value if there are several.

    Attributes:
        unit: "%" for shares, which are drawn times 100; else the values are drawn as they are.
        values: of all sites, by round.
        baseline: what a model that has learnt nothing reaches, and how, in a word or two; drawn as a dashed line.
    """

    title: str
    unit: str
    values: Mapping[int, Sequence[float]]
    baseline: tuple[str, float] | None = None


@dataclass(frozen=True)
class Series:
    """Points of one kind.

    Attributes:
        values: shares (0 to 1) by the name of a class or site.
        marker: of matplotlib.
        hollow: not filled: the points are of another round than those of the other series.
    """

    label: str
    values: Mapping[str, float]
    colour: str
    marker: str
    hollow: bool = False


def over_rounds(charts: Sequence[Panel]) -> Figure:
    """A figure of panels, two in a row."""
    rows = -(-len(charts) // 2)
    figure = Figure(figsize=(CHART_WIDTH, 2.5 * rows), layout="constrained")
    for axes, panel in zip(panels(figure, rows, 2, len(charts)), charts, strict=True):
        _panel(axes, panel)
    return figure


def points(names: Sequence[str], series: Sequence[Series], label: str) -> Figure:
    """Shares in percent over names on the horizontal axis, which is labelled `label`; series are shifted apart."""
    figure = Figure(figsize=(CHART_WIDTH, 3.2), layout="constrained")
    axes = figure.add_subplot()
    shift = np.linspace(-0.2, 0.2, len(series)) if len(series) > 1 and len(names) <= NAMED else [0.0] * len(series)
    for offset, points_of in zip(shift, series, strict=True):
        places = [place for place, name in enumerate(names) if name in points_of.values]
        face = "white" if points_of.hollow else points_of.colour
        heights = [100 * points_of.values[names[place]] for place in places]
        size = 6 if len(names) <= NAMED else 4
        style: Any = {"ms": size, "color": points_of.colour, "mfc": face, "mew": 1.2, "clip_on": False, "zorder": 3}
        axes.plot(np.array(places) + offset, heights, points_of.marker, label=points_of.label, **style)
    _name_ticks(axes, names)
    axes.set_ylim(0, 104)
    axes.set_ylabel("%", rotation=0, labelpad=10)
    grid(axes)
    axes.set_xlabel(label)
    figure.legend(loc="outside upper left", ncols=2, fontsize=8)
    return figure


def horizontal_points(names: Sequence[str], series: Sequence[Series]) -> Figure:
    """Shares in percent over names on the vertical axis, the first on top; dotted lines are means."""
    figure = Figure(figsize=(CHART_WIDTH, 1.1 + 0.24 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    for points_of in series:
        places = [place for place, name in enumerate(names) if name in points_of.values]
        widths = [100 * points_of.values[names[place]] for place in places]
        axes.plot(
            widths,
            places,
            points_of.marker,
            ms=6,
            color=points_of.colour,
            label=points_of.label,
            clip_on=False,
            zorder=3,
        )
        axes.axvline(float(np.mean(widths)), color=points_of.colour, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% (dotted: mean over sites)")
    grid(axes, "both")
    figure.legend(loc="outside upper left", ncols=3, fontsize=8)
    return figure


@dataclass(frozen=True)
class RoundSize:
    """A round that counts.

    Attributes:
        invited: sites that were asked to train.
        used: sites whose updates are in its state.
        seconds: from its opening to its state.
        abandoned: attempts before it that came to nothing.
    """

    invited: int
    used: int
    seconds: float
    abandoned: int


def round_sizes(by_round: Mapping[int, RoundSize]) -> Figure:
    """Sites and seconds by round, in two panels; abandoned attempts are crosses at the bottom."""
    figure = Figure(figsize=(CHART_WIDTH, 2.7), layout="constrained")
    left, right = figure.subplots(1, 2)
    numbers = sorted(by_round)
    sizes = [by_round[number] for number in numbers]
    left.step(
        numbers, [size.invited for size in sizes], where="mid", color=ORANGE, linestyle="--", label="asked to train"
    )
    left.step(numbers, [size.used for size in sizes], where="mid", color=BLUE, label="whose updates were used")
    if failed := [number for number in numbers if by_round[number].abandoned]:
        left.plot(failed, [0] * len(failed), "x", color="black", clip_on=False, label="attempts were abandoned before")
    left.set_title("Sites", fontsize=9)
    left.yaxis.set_major_locator(MaxNLocator(integer=True))
    right.plot(
        numbers,
        [size.seconds for size in sizes],
        color=BLUE,
        linewidth=1.6,
        marker="o" if len(numbers) <= NAMED else None,
        ms=3,
    )
    right.set_title("Seconds", fontsize=9)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        _rounds(axes)
    figure.legend(loc="outside upper left", ncols=3, fontsize=8)
    return figure


def volumes(by_round: Mapping[int, tuple[int, int]]) -> Figure:
    """Bytes (received, offered) by round, drawn in MB of 10^6 bytes."""
    figure = Figure(figsize=(CHART_WIDTH, 2.6), layout="constrained")
    axes = figure.add_subplot()
    numbers = sorted(by_round)
    both = np.array([by_round[number] for number in numbers], dtype=float) / 1e6  # [rounds, 2]
    axes.step(numbers, both[:, 0], where="mid", color=BLUE, label="received: updates of the sites")
    axes.step(
        numbers,
        both[:, 1],
        where="mid",
        color=ORANGE,
        linestyle="--",
        label="offered: models that sites were asked to train",
    )
    if len(numbers) <= NAMED:
        axes.plot(numbers, both[:, 0], "o", color=BLUE, ms=4)
        axes.plot(numbers, both[:, 1], "^", color=ORANGE, ms=4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MB")
    _rounds(axes)
    figure.legend(loc="outside upper left", ncols=2, fontsize=8)
    return figure


def matrix(values: Array, rows: Sequence[str], columns: Sequence[str], unit: str, *, signed: bool) -> Figure:
    """A heat map of values [rows, columns].

    Args:
        values: NaN is grey; up to 144 values are written into their cells.
        unit: the label of the colour bar.
        signed: colours reach from -max to max, else from 0 to max.
    """
    height = min(5.6, 1.4 + 0.42 * len(rows)) if signed else min(7.5, 1.2 + 0.26 * len(rows))
    figure = Figure(figsize=(min(CHART_WIDTH, height + 1.2) if signed else CHART_WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    limit = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    axes.set_facecolor("0.85")
    axes.spines[:].set_visible(False)
    cmap, low = ("PuOr_r", -limit) if signed else ("Blues", 0.0)
    image = axes.imshow(np.ma.masked_invalid(values), cmap=cmap, vmin=low, vmax=limit or 1.0, aspect="auto")
    _name_ticks(axes, columns)
    few = len(rows) <= 2 * NAMED
    places = range(len(rows)) if few else range(0, len(rows), -(-len(rows) // NAMED))
    axes.set_yticks(list(places), [rows[place] for place in places], fontsize=8)
    if values.size <= 144:
        _write_values(axes, values, image.cmap, low, limit or 1.0)
    figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02, label=unit)
    return figure


def reliability(bins: Mapping[int, tuple[float, float, float]]) -> Figure:
    """A reliability diagram: accuracy over confidence.

    Args:
        bins: (accuracy, mean confidence, share of the answers) by bin, each 0 to 1; the share is the size of a point.
    """
    figure = Figure(figsize=(4.6, 3.8), layout="constrained")
    axes = figure.add_subplot()
    table = np.array([bins[number] for number in sorted(bins)])  # [bins, 3]
    axes.plot([0, 100], [0, 100], color="0.5", linewidth=1, linestyle="--", label="perfectly calibrated")
    axes.plot(100 * table[:, 1], 100 * table[:, 0], color=BLUE, linewidth=1)
    axes.scatter(100 * table[:, 1], 100 * table[:, 0], 12 + 300 * table[:, 2], color=BLUE, alpha=0.8, label="answers")
    axes.set_xlim(0, 103)
    axes.set_ylim(0, 103)
    axes.set_xlabel("how sure the model is, %")
    axes.set_ylabel("how often it is right, %")
    axes.grid(color="0.9", linewidth=0.8)
    axes.legend(loc="upper left", fontsize=8)
    return figure


def _panel(axes: Axes, panel: Panel) -> None:
    factor = 100 if panel.unit == "%" else 1
    numbers = sorted(panel.values)
    means = [factor * float(np.mean(panel.values[number])) for number in numbers]
    axes.plot(numbers, means, color=BLUE, linewidth=1.6, marker="o" if len(numbers) <= NAMED else None, ms=3)
    if any(len(values) > 1 for values in panel.values.values()):
        low = [factor * min(panel.values[number]) for number in numbers]
        high = [factor * max(panel.values[number]) for number in numbers]
        axes.fill_between(numbers, low, high, color=BLUE, alpha=0.15, linewidth=0)
    if panel.unit == "%":  # all of it: cut to the values, a rise from 0 to 7 % looks like success
        axes.set_ylim(0, 100)
    if panel.baseline is not None:
        how, share = panel.baseline
        axes.axhline(factor * share, color="0.4", linewidth=1, linestyle="--")
        axes.annotate(how, (numbers[-1], factor * share), (0, 2), textcoords="offset points", ha="right", fontsize=7)
    axes.set_title(panel.title, fontsize=9)
    axes.set_ylabel(panel.unit, rotation=0, ha="right")
    axes.annotate(f"{means[-1]:.3g}", (numbers[-1], means[-1]), (4, 0), textcoords="offset points", va="center")
    _rounds(axes)


def _rounds(axes: Axes) -> None:
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    grid(axes)
    axes.margins(x=0.03)


def _name_ticks(axes: Axes, names: Sequence[str]) -> None:
    every = 1 if len(names) <= NAMED else -(-len(names) // NAMED)
    labels = [short(name, LONGEST_NAME) for name in names[::every]]
    turned = 90 if sum(map(len, labels)) > LETTERS else 0
    axes.set_xticks(range(0, len(names), every), labels, rotation=turned, fontsize=8)


def _write_values(axes: Axes, values: Array, cmap: Colormap, low: float, high: float) -> None:
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue, _ = cmap((value - low) / (high - low))
            # Luma weights of ITU-R BT.601: white on dark cells, black on light ones.
            ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color=ink)


def lines(series: Mapping[str, Curve], title: str, axis: str = "round") -> NotebookFigure:
    """A line for each series in percent: its name, rounds (or what `axis` says) and values [seeds, rounds]."""
    figure = NotebookFigure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for place, (rounds, values) in enumerate(series.values()):
        colour, style = _look(place)
        percent = 100 * values  # [seeds, rounds]
        marker = "o" if len(rounds) == 1 else None
        axes.plot(rounds, percent.mean(0), color=colour, linestyle=style, linewidth=1.8, marker=marker)
        if len(values) > 1:
            axes.fill_between(rounds, percent.min(0), percent.max(0), color=colour, alpha=0.15, linewidth=0)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(axis)
    axes.set_ylabel("%", rotation=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=axis == "round"))
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    _name_lines(axes, series)
    seeds = max(len(values) for _, values in series.values())
    if seeds > 1:
        figure.supxlabel(f"line: mean over seeds, band: smallest to largest of up to {seeds}", fontsize=8, color="0.4")
    return figure


def _name_lines(axes: Axes, series: Mapping[str, Curve]) -> None:
    """Each line's name right of the picture, in its colour, clear of the others, with a thread to the line's end."""
    low, high = axes.get_ylim()
    ends = [(rounds[-1], float(100 * values.mean(0)[-1])) for rounds, values in series.values()]
    last = max(end for end, _ in ends)
    heights = spaced([(end - low) / (high - low) for _, end in ends], _GAP)
    for place, (label, end, height) in enumerate(zip(series, ends, heights, strict=True)):
        colour, style = _look(place)
        axes.annotate(
            label,
            xy=end,
            xytext=(1.04, height),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=colour,
            arrowprops={
                "arrowstyle": "-",
                "relpos": (0, 0.5),
                "color": colour,
                # A line that ends before others do must not seem to go on.
                "linestyle": style if end[0] == last else (0, (1, 4)),
                "linewidth": 1,
                "shrinkA": 2,
                "shrinkB": 0,
            },
            annotation_clip=False,
        )


def _look(place: int) -> tuple[str, str]:
    """Colour and line style of the recipe at a place."""
    return COLOURS[place % len(COLOURS)], STYLES[place // len(COLOURS) % len(STYLES)]


def spaced(heights: Sequence[float], gap: float) -> list[float]:
    """The heights, in 0..1, moved apart to at least `gap` with as little ado as a name at a line's end needs."""
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    gap = min(gap, 1 / max(len(heights) - 1, 1))
    moved = list(heights)
    for lower, upper in pairwise(order):
        moved[upper] = max(moved[upper], moved[lower] + gap)
    if order and moved[order[-1]] > 1:
        moved[order[-1]] = 1.0
        for upper, lower in pairwise(reversed(order)):
            moved[lower] = min(moved[lower], moved[upper] - gap)
    return moved
