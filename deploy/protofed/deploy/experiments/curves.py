"""Scores over rounds, bytes or epochs as pictures: a line a recipe, named at its end, with a band over its seeds."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from protofed.common.storage import files
from protofed.deploy.experiments.cost import Cost, costs
from protofed.deploy.experiments.experiment import Result
from protofed.deploy.experiments.summary import over_sites

# Okabe and Ito's colours, distinguished by colour-blind readers; yellow is too pale for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", "--", ":")  # when the colours are used up
FAMILIES = {
    "global.accuracy": "Global model, accuracy on the test set (GM)",
    "global.balanced_accuracy": "Global model, balanced accuracy",
    "personal.pm_v": "Sites' own models on their own classes, PM(V)",
    "personal.pm_l": "Sites' own models by their own class frequencies, PM(L)",
    "personal.balanced_accuracy": "Sites' own models, balanced accuracy on all classes",
    "personal.local.accuracy": "Sites' own models on their local tests, mean over sites",
    "global.local.accuracy": "Global model on the sites' local tests, mean over sites",
}
SAME = 0.05  # share by which steps of one axis may differ and be called equal
Curve: TypeAlias = tuple[Sequence[float], NDArray[np.float64]]  # places on the axis, and values [seeds, places]
_GAP = 0.055  # between two names, as a share of the picture's height


@dataclass(frozen=True)
class Curves:
    """One picture: a score of all recipes that have it.

    Attributes:
        series: by recipe.
    """

    score: str
    title: str
    axis: Axis
    series: Mapping[str, Curve]

    @property
    def figure(self) -> NotebookFigure:
        """Drawn anew."""
        return picture(self.series, self.title, self.axis.label)

    @property
    def stem(self) -> str:
        """Of the files' names."""
        return _stem(self.score, self.axis)


def draw(curves: Sequence[Curves], out: Path) -> list[Path]:
    """Write each as `curve-<score>.png` and `.svg`, those over bytes and epochs as `curve-<score>-bytes` …; the paths.

    Those of an earlier call that are not drawn any more are removed.
    """
    paths = []
    for one in curves:
        figure = one.figure
        for suffix in ("png", "svg"):
            paths.append(out / f"{one.stem}.{suffix}")
            files.write(paths[-1], rendered(figure, suffix), files.PUBLIC)
    drawable = {
        out / f"{_stem(name, axis)}.{suffix}" for name in FAMILIES for axis in AXES for suffix in ("png", "svg")
    }
    for old in drawable - set(paths):  # by name: people keep pictures of their own beside these
        old.unlink(missing_ok=True)
    return paths


def _stem(score: str, axis: Axis) -> str:
    return "-".join(["curve", score.replace(".", "-"), *([] if axis is ROUNDS else [axis.key])])


def curves_of(results: Mapping[str, Sequence[Result]]) -> list[Curves]:
    """One for each family of scores that the results have; of the papers' scores over bytes and epochs, too.

    Not where a round is the same step for all recipes: the curves over rounds say as much.

    Args:
        results: by recipe, one for each seed.
    """
    found = []
    for name, title in FAMILIES.items():
        for axis in AXES if name in OVER_COST else (ROUNDS,):
            of = {label: over_axis(seeds, name, axis) for label, seeds in results.items()}
            series = {label: curve for label, curve in of.items() if curve is not None}
            if series and (axis is ROUNDS or not _is_rescaled(results, name, axis)):
                found.append(Curves(name, title, axis, series))
    return found


@dataclass(frozen=True)
class Axis:
    """What scores are drawn over; `read` gives its value at the end of a round of a run, if that is known."""

    key: str
    label: str
    read: Callable[[int, Mapping[int, Cost]], float | None]


def _bytes(number: int, of_run: Mapping[int, Cost]) -> float | None:
    moved = None if number not in of_run else of_run[number].bytes
    return None if moved is None else moved / 1e6


ROUNDS = Axis("rounds", "round", lambda number, _: number)
AXES = (
    ROUNDS,
    Axis("bytes", "MB (10^6 bytes) between server and sites, up to the round", _bytes),
    Axis("epochs", "local epochs, up to the round", lambda number, of: of[number].epochs if number in of else None),
)
OVER_COST = ("global.accuracy", "personal.pm_v", "personal.local.accuracy", "global.local.accuracy")


def over_axis(results: Sequence[Result], name: str, axis: Axis) -> tuple[list[float], NDArray[np.float64]] | None:
    """As `over_rounds`, with the mean over seeds of the axis in place of rounds; None: also where it is not known."""
    if (found := over_rounds(results, name)) is None:
        return None
    rounds, values = found
    by_seed = [costs(result) for result in results]
    places = [[axis.read(number, of_seed) for number in rounds] for of_seed in by_seed]
    known = [[place for place in of_seed if place is not None] for of_seed in places]
    if any(len(of_seed) < len(rounds) for of_seed in known):
        return None
    return np.array(known, dtype=float).mean(0).tolist(), values


def _is_rescaled(results: Mapping[str, Sequence[Result]], name: str, axis: Axis) -> bool:
    """Whether a round is the same step on this axis for all recipes, so that the picture over rounds says as much."""
    steps = []
    for seeds in results.values():
        over, of_rounds = over_axis(seeds, name, axis), over_rounds(seeds, name)
        if over is not None and of_rounds is not None:
            steps += [place / number for place, number in zip(over[0], of_rounds[0], strict=True)]
    return bool(steps) and max(steps) <= (1 + SAME) * min(steps)


def over_rounds(results: Sequence[Result], name: str) -> tuple[list[int], NDArray[np.float64]] | None:
    """Rounds that all seeds have the score of, and its mean over sites, [seeds, rounds]; None if there are none."""
    means = [
        {
            round_: spread[name].mean
            for round_, spread in over_sites(result.scores, result.sums).items()
            if name in spread
        }
        for result in results
    ]
    rounds = sorted(set.intersection(*map(set, means))) if means else []
    return (rounds, np.array([[of_seed[r] for r in rounds] for of_seed in means])) if rounds else None


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


class NotebookFigure(Figure):
    """A figure that a notebook shows by itself; it knows how to show others only once pyplot was imported."""

    def _repr_png_(self) -> bytes:
        drawn = io.BytesIO()
        self.savefig(drawn, format="png", dpi=100)
        return drawn.getvalue()


def picture(series: Mapping[str, Curve], title: str, axis: str = "round") -> NotebookFigure:
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


def rendered(figure: Figure, suffix: str) -> bytes:
    held = BytesIO()
    metadata = {"Date": None} if suffix == "svg" else {}
    with rc_context({"svg.hashsalt": "protofed"}):  # equal results, equal files
        figure.savefig(held, format=suffix, dpi=160, metadata=metadata)
    return held.getvalue()
