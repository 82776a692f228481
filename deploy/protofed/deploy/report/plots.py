"""The drawings of a report: told apart by colour and by shape, so that they also work in black and white."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from protofed.common.errors import short
from protofed.common.payload import Array
from protofed.deploy.experiments.curves import COLOURS

WIDTH = 8.6  # inches
LONGEST_NAME, LETTERS = 28, 90  # of a name on an axis; of all of them side by side
NAMED = 24  # more classes than that have room for some of their numbers only
BLUE, ORANGE, GREEN = COLOURS[0], COLOURS[1], COLOURS[2]


@dataclass(frozen=True)
class Panel:
    """A value over rounds: a line of means, with a band from the smallest to the largest where there are several."""

    title: str
    unit: str
    values: Mapping[int, Sequence[float]]


@dataclass(frozen=True)
class Series:
    """Points, one a class or site; hollow ones are of another round than the others."""

    label: str
    values: Mapping[str, float]
    colour: str
    marker: str
    hollow: bool = False


def over_rounds(panels: Sequence[Panel]) -> Figure:
    """Panels, two in a row."""
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(WIDTH, 2.5 * rows), layout="constrained")
    grid = figure.subplots(rows, 2, squeeze=False).flat
    for place, panel in enumerate(panels):
        _panel(grid[place], panel)
    for axes in list(grid)[len(panels) :]:
        axes.set_visible(False)
    return figure


def points(names: Sequence[str], series: Sequence[Series], label: str) -> Figure:
    """Values 0 to 100 over names that stand side by side."""
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = figure.add_subplot()
    shift = np.linspace(-0.2, 0.2, len(series)) if len(series) > 1 and len(names) <= NAMED else [0.0] * len(series)
    for by, one in zip(shift, series, strict=True):
        known = [place for place, name in enumerate(names) if name in one.values]
        face = "white" if one.hollow else one.colour
        heights = [100 * one.values[names[place]] for place in known]
        size = 6 if len(names) <= NAMED else 4
        look: Any = {"ms": size, "color": one.colour, "mfc": face, "mew": 1.2, "clip_on": False, "zorder": 3}
        axes.plot(np.array(known) + by, heights, one.marker, label=one.label, **look)
    _named(axes, names)
    axes.set_ylim(0, 104)
    axes.set_ylabel("%", rotation=0, labelpad=10)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(label)
    figure.legend(loc="outside upper left", ncols=2, fontsize=8)
    return figure


def lying(names: Sequence[str], series: Sequence[Series]) -> Figure:
    """Values 0 to 100 of names that stand below one another, the first on top."""
    figure = Figure(figsize=(WIDTH, 1.1 + 0.24 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    for one in series:
        known = [place for place, name in enumerate(names) if name in one.values]
        widths = [100 * one.values[names[place]] for place in known]
        axes.plot(widths, known, one.marker, ms=6, color=one.colour, label=one.label, clip_on=False, zorder=3)
        axes.axvline(float(np.mean(widths)), color=one.colour, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% (dotted: mean over sites)")
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper left", ncols=3, fontsize=8)
    return figure


def volumes(by_round: Mapping[int, tuple[int, int]]) -> Figure:
    """Bytes received and sent, by round, in MB."""
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    axes = figure.add_subplot()
    numbers = sorted(by_round)
    both = np.array([by_round[number] for number in numbers], dtype=float) / 1e6  # [rounds, 2]
    axes.step(numbers, both[:, 0], where="mid", color=BLUE, label="received: updates of the sites")
    axes.step(numbers, both[:, 1], where="mid", color=ORANGE, linestyle="--", label="sent: models to be trained")
    if len(numbers) <= NAMED:
        axes.plot(numbers, both[:, 0], "o", color=BLUE, ms=4)
        axes.plot(numbers, both[:, 1], "^", color=ORANGE, ms=4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MB")
    _rounds(axes)
    figure.legend(loc="outside upper left", ncols=2, fontsize=8)
    return figure


def matrix(values: Array, rows: Sequence[str], columns: Sequence[str], unit: str, *, signed: bool) -> Figure:
    """A heat map [rows, columns], grey where there is no number; small ones have their numbers written in."""
    height = min(5.6, 1.4 + 0.42 * len(rows)) if signed else min(7.5, 1.2 + 0.26 * len(rows))
    figure = Figure(figsize=(min(WIDTH, height + 1.2) if signed else WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    limit = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    axes.set_facecolor("0.85")
    axes.spines[:].set_visible(False)
    cmap, low = ("PuOr_r", -limit) if signed else ("Blues", 0.0)
    shown = axes.imshow(np.ma.masked_invalid(values), cmap=cmap, vmin=low, vmax=limit or 1.0, aspect="auto")
    _named(axes, columns)
    few = len(rows) <= 2 * NAMED
    places = range(len(rows)) if few else range(0, len(rows), -(-len(rows) // NAMED))
    axes.set_yticks(list(places), [rows[place] for place in places], fontsize=8)
    if values.size <= 144:
        _written(axes, values, shown.cmap, low, limit or 1.0)
    figure.colorbar(shown, ax=axes, shrink=0.9, pad=0.02, label=unit)
    return figure


def reliability(bins: Mapping[int, tuple[float, float, float]]) -> Figure:
    """Share of right answers over confidence, by bin: (accuracy, confidence, share of the answers)."""
    figure = Figure(figsize=(4.6, 3.8), layout="constrained")
    axes = figure.add_subplot()
    found = np.array([bins[number] for number in sorted(bins)])  # [bins, 3]
    axes.plot([0, 100], [0, 100], color="0.5", linewidth=1, linestyle="--", label="perfectly calibrated")
    axes.plot(100 * found[:, 1], 100 * found[:, 0], color=BLUE, linewidth=1)
    axes.scatter(100 * found[:, 1], 100 * found[:, 0], 12 + 300 * found[:, 2], color=BLUE, alpha=0.8, label="answers")
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
    axes.set_title(panel.title, fontsize=9)
    axes.set_ylabel(panel.unit, rotation=0, ha="right")
    axes.annotate(f"{means[-1]:.3g}", (numbers[-1], means[-1]), (4, 0), textcoords="offset points", va="center")
    _rounds(axes)


def _rounds(axes: Axes) -> None:
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.03)


def _named(axes: Axes, names: Sequence[str]) -> None:
    every = 1 if len(names) <= NAMED else -(-len(names) // NAMED)
    shown = [short(name, LONGEST_NAME) for name in names[::every]]
    turned = 90 if sum(map(len, shown)) > LETTERS else 0
    axes.set_xticks(range(0, len(names), every), shown, rotation=turned, fontsize=8)


def _written(axes: Axes, values: Array, cmap: Colormap, low: float, high: float) -> None:
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue, _ = cmap((value - low) / (high - low))
            ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color=ink)
