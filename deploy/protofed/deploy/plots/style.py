"""What all pictures have in common: colours, frames, saving."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

from protofed.common.config.recipe import Recipe
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


def panels(figure: FigureBase, rows: int, columns: int, shown: int) -> list[Axes]:
    """A grid of so many panels, of which the first ones are shown."""
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in every[shown:]:
        axes.set_visible(False)
    return every[:shown]


class NotebookFigure(Figure):
    """A figure that a notebook shows by itself; it knows how to show others only once pyplot was imported."""

    def _repr_png_(self) -> bytes:
        drawn = BytesIO()
        self.savefig(drawn, format="png", dpi=100)
        return drawn.getvalue()


def rendered(figure: Figure, suffix: str) -> bytes:
    """A figure as the bytes of a file; equal figures give equal bytes."""
    held = BytesIO()
    metadata = {"Date": None} if suffix == "svg" else {}
    with rc_context({"svg.hashsalt": "protofed"}):
        figure.savefig(held, format=suffix, dpi=160, metadata=metadata)
    return held.getvalue()
