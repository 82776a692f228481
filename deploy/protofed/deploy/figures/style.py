"""What all pictures of `protofed figures` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from protofed.common.config.recipe import Recipe
from protofed.common.payload import Array
from protofed.common.storage import files
from protofed.deploy.experiments.curves import COLOURS, rendered

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
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
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
