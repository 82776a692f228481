"""Scores over rounds as pictures: a line a recipe, named at its end, with a band over its seeds."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from protofed.common.storage import files
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
_GAP = 0.055  # between two names, as a share of the picture's height


def draw(results: Mapping[str, Sequence[Result]], out: Path) -> list[Path]:
    """One picture for each family of scores that the results have, as `curve-<name>.png` and `.svg`; their paths.

    Args:
        results: by recipe, one for each seed.
    """
    paths = []
    for name, title in FAMILIES.items():
        series = {label: found for label, seeds in results.items() if (found := over_rounds(seeds, name)) is not None}
        if not series:
            continue
        figure = picture(series, title)
        for suffix in ("png", "svg"):
            paths.append(out / f"curve-{name.replace('.', '-')}.{suffix}")
            files.write(paths[-1], rendered(figure, suffix), files.PUBLIC)
    return paths


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


def picture(series: Mapping[str, tuple[list[int], NDArray[np.float64]]], title: str) -> NotebookFigure:
    """A line for each series in percent: its name, rounds and values [seeds, rounds]."""
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
    axes.set_xlabel("round")
    axes.set_ylabel("%", rotation=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    _name_lines(axes, series)
    seeds = max(len(values) for _, values in series.values())
    if seeds > 1:
        figure.supxlabel(f"line: mean over seeds, band: smallest to largest of up to {seeds}", fontsize=8, color="0.4")
    return figure


def _name_lines(axes: Axes, series: Mapping[str, tuple[list[int], NDArray[np.float64]]]) -> None:
    """Each line's name right of the picture, in its colour, clear of the others, with a thread to the line's end."""
    low, high = axes.get_ylim()
    ends = [(rounds[-1], float(100 * values.mean(0)[-1])) for rounds, values in series.values()]
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
                "linestyle": style,
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
