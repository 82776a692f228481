"""Test examples as points of a plane: two-dimensional embeddings as they are, others by t-SNE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from protofed.common.payload import Array, Part, unit
from protofed.deploy.figures.finished_run import Embedded, FinishedRun
from protofed.deploy.plots import NAMED_CLASSES, bare, class_look, class_names, panels, scatter, titled

MAX_EXAMPLES = 1500  # test examples in a picture
_SEED = 0
_BAND = 0.22  # width of the ring on which unit embeddings are drawn, so that equal ones are seen
_OUTLINE = [withStroke(linewidth=2.5, foreground="white")]


@dataclass(frozen=True, eq=False)
class Plane:
    """One panel.

    Attributes:
        points: [N, 2].
        labels: [N].
        marks: by class, [2] each: where prototypes are, or which way the rows of a head point.
    """

    title: str
    points: Array
    labels: Array
    marks: Mapping[int, Array]


def tsne(features: Array, prototypes: Mapping[int, Array]) -> tuple[Array, dict[int, Array]]:
    """Features [N, D] and prototypes [D] in one plane, as van der Maaten and Hinton (2008) place them; deterministic.

    Returns:
        Points [N, 2], and the prototypes' [2] each.
    """
    from sklearn.manifold import TSNE  # takes seconds

    rows = np.concatenate((features, *(row[None] for row in prototypes.values()))).astype(np.float32)
    perplexity = min(30.0, (len(rows) - 1) / 3)
    placed = TSNE(perplexity=perplexity, init="pca", random_state=_SEED, n_jobs=1).fit_transform(rows)
    return placed[: len(features)], dict(zip(prototypes, placed[len(features) :], strict=True))


def on_ring(features: Array, labels: Array) -> Array:
    """Unit embeddings [N, 2] a little in and out of the unit circle, by chance: their angles stay."""
    radius = 1 + np.random.default_rng(_SEED).uniform(-_BAND / 2, _BAND / 2, (len(labels), 1))
    return np.asarray(unit(features.astype(float)) * radius)


def by_angle(run: FinishedRun, embedding: Embedded) -> Plane:
    """A run whose embedding has two dimensions: directions, with those of the prototypes, or of the head's rows."""
    rows = embedding.prototypes or dict(enumerate(run.state.get(Part.HEAD, {}).get("weight", ())))
    marks = {c: unit(np.asarray(row, dtype=float)) for c, row in rows.items()}
    return Plane(_title(run), on_ring(embedding.features, embedding.labels), embedding.labels, marks)


def by_neighbours(run: FinishedRun, embedding: Embedded) -> Plane:
    """Any run, by t-SNE."""
    points, marks = tsne(embedding.features, embedding.prototypes)
    return Plane(_title(run), points, embedding.labels, marks)


def draw_angles(inputs: Plane | None, planes: Sequence[Plane]) -> Figure:
    """Rays among test points on the unit circle; `inputs`, the points as they were, stand left of them."""
    columns, rows = min(len(planes), 2), -(-len(planes) // 2)
    figure = titled(
        0.5 + 2.65 * rows,
        "Directions of embeddings, with prototypes or head rows as rays; accuracy of the global model",
    )
    shares = (1, columns) if inputs else (columns,)
    parts = figure.subfigures(1, len(shares), squeeze=False, width_ratios=shares)[0]
    if inputs:
        axes = parts[0].subplots()
        scatter(axes, inputs.points, inputs.labels, 5)
        axes.set_title(inputs.title, loc="left", fontsize=9)
        bare(axes)
    for axes, plane in zip(panels(parts[-1], rows, columns, len(planes)), planes, strict=True):
        _rays(axes, plane)
    return figure


def draw_tsne(planes: Sequence[Plane], names: Sequence[str]) -> Figure:
    """Test points with their prototypes, two panels a row; classes are named where there is room for names."""
    columns, rows = min(len(planes), 2), -(-len(planes) // 2)
    figure = titled(0.5 + 3.7 * rows, "Test examples as the global model embeds them (t-SNE), and its accuracy")
    for axes, plane in zip(panels(figure, rows, columns, len(planes)), planes, strict=True):
        scatter(axes, plane.points, plane.labels, 7)
        if len(names) <= NAMED_CLASSES:
            _name_classes(axes, plane, names)
        axes.set_title(plane.title, loc="left", fontsize=9)
        bare(axes)
    if any(plane.marks for plane in planes):
        figure.supxlabel("stars: global prototypes, joined to the median point of their class", fontsize=8, color="0.4")
    return figure


def inputs_plane(embedding: Embedded) -> Plane | None:
    """The test points themselves, where they are points of a plane."""
    if embedding.inputs[0].size != 2:
        return None
    return Plane("test points", embedding.inputs.reshape(-1, 2), embedding.labels, {})


def name_classes(run: FinishedRun) -> list[str]:
    """Of the run's classes."""
    return class_names(run.recipe)


def _rays(axes: Axes, plane: Plane) -> None:
    scatter(axes, plane.points, plane.labels, 6)
    for c, (x, y) in plane.marks.items():
        colour, _ = class_look(c)
        axes.plot((0, x), (0, y), color=colour, linewidth=2.2, solid_capstyle="round")
        axes.text(1.24 * x, 1.24 * y, str(c), ha="center", va="center", fontsize=9, color=colour)
    axes.set_title(plane.title, loc="left", fontsize=9)
    bare(axes)
    axes.set_xlim(-1.36, 1.36)
    axes.set_ylim(-1.36, 1.36)


def _name_classes(axes: Axes, plane: Plane, names: Sequence[str]) -> None:
    middles = {int(c): np.median(plane.points[plane.labels == c], axis=0) for c in np.unique(plane.labels)}
    for c, (x, y) in plane.marks.items():
        colour, _ = class_look(c)
        axes.plot(*zip(middles.get(c, (x, y)), (x, y), strict=True), color="black", linewidth=0.9, zorder=3)
        axes.scatter(x, y, 110, colour, marker="*", edgecolors="black", linewidths=0.9, zorder=4)
    for c, middle in middles.items():
        axes.annotate(
            names[c], middle, ha="center", va="center", fontsize=10, weight="bold", path_effects=_OUTLINE, zorder=5
        )


def _title(run: FinishedRun) -> str:
    accuracy = run.scores.get("global.accuracy")
    return run.label if accuracy is None else f"{run.label}: {100 * accuracy:.1f} %"
