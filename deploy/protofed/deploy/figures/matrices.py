"""Matrices of a run: cosines between FedNH's prototypes, and what norms of cwFedAVG's heads say of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from protofed.client.training.losses import class_shares
from protofed.common.errors import ConfigError
from protofed.common.payload import Array, Part, unit
from protofed.deploy.figures.finished_run import FinishedRun
from protofed.deploy.plots import NAMED_CLASSES, class_names, percent, titled
from protofed.server.method import ClasswiseMethod
from protofed.server.rounds.context import round_context

# The 20 super-classes of CIFAR-100 (Krizhevsky, 2009) by the numbers of their classes.
CIFAR100 = {
    "aquatic mammals": (4, 30, 55, 72, 95),
    "fish": (1, 32, 67, 73, 91),
    "flowers": (54, 62, 70, 82, 92),
    "food containers": (9, 10, 16, 28, 61),
    "fruit, vegetables": (0, 51, 53, 57, 83),
    "electrical devices": (22, 39, 40, 86, 87),
    "furniture": (5, 20, 25, 84, 94),
    "insects": (6, 7, 14, 18, 24),
    "large carnivores": (3, 42, 43, 88, 97),
    "outdoor things": (12, 17, 37, 68, 76),
    "outdoor scenes": (23, 33, 49, 60, 71),
    "large herbivores": (15, 19, 21, 31, 38),
    "medium mammals": (34, 63, 64, 66, 75),
    "invertebrates": (26, 45, 77, 79, 99),
    "people": (2, 11, 35, 46, 98),
    "reptiles": (27, 29, 44, 78, 93),
    "small mammals": (36, 50, 65, 74, 80),
    "trees": (47, 52, 56, 59, 96),
    "vehicles 1": (8, 13, 48, 58, 90),
    "vehicles 2": (41, 69, 81, 85, 89),
}
CIFAR10 = {"vehicles": (0, 1, 8, 9), "animals": (2, 3, 4, 5, 6, 7)}
Groups: TypeAlias = Mapping[str, Sequence[int]]
KNOWN: Mapping[str, Groups] = {"cifar10": CIFAR10, "cifar100": CIFAR100}


@dataclass(frozen=True, eq=False)
class Shares:
    """How sites' data and models are divided among classes; rows add up to 1.

    Attributes:
        sites: names of the rows, M.
        true: n_ij / n_i, [M, C].
        local: p~_ij of the sites' own models, [M, C].
        models: the same of the class models, [C, C].
    """

    sites: Sequence[str]
    true: Array
    local: Array
    models: Array

    @property
    def gap(self) -> float:
        """The mean over sites of Omega_i = ||p_i - p~_i||_2."""
        return float(np.linalg.norm(self.true - self.local, axis=1).mean())


def cosines(rows: Array) -> Array:
    """Of all pairs of rows, [C, D] -> [C, C]; a zero row has none with anything."""
    directions = unit(np.asarray(rows, dtype=float))
    return np.asarray(directions @ directions.T)


def within_and_between(similarity: Array, groups: Groups) -> tuple[float, float] | None:
    """Means of a similarity [C, C] over pairs of classes of one group and of two groups; None without such pairs."""
    group = np.full(len(similarity), -1)
    for number, members in enumerate(groups.values()):
        group[list(members)] = number
    same, apart = group[:, None] == group[None, :], ~np.eye(len(similarity), dtype=bool)
    inside, outside = similarity[same & apart], similarity[~same]
    return (float(inside.mean()), float(outside.mean())) if len(inside) and len(outside) else None


def norm_shares(weight: Array) -> Array:
    """p~_j = ||w_j||_2 / sum_k ||w_k||_2 of a head's rows, [C, D] -> [C] (Lee and Choi; METHODS 3.1)."""
    return class_shares(torch.from_numpy(np.asarray(weight, dtype=float))).numpy()


def read_groups(text: str | None, source: str, classes: int) -> dict[str, list[int]]:
    """Groups of classes as the command line has them, `vehicles:0,1,8,9;animals:2,3`, or else the source's own.

    Classes that no group names come last, as one more.

    Raises:
        ConfigError: they are no such groups, or name a class twice or one that there is not.
    """
    known = {name: list(members) for name, members in KNOWN.get(source, {}).items()}
    groups = known if text is None else _groups(text)
    grouped = [c for members in groups.values() for c in members]
    if len(set(grouped)) < len(grouped) or any(c >= classes for c in grouped):
        raise ConfigError(f"groups name {sorted(grouped)}; expected each class of 0 to {classes - 1} at most once")
    ungrouped = [c for c in range(classes) if c not in grouped]
    return {**groups, ("others" if groups else "classes"): ungrouped} if ungrouped else groups


def _groups(text: str) -> dict[str, list[int]]:
    groups = {}
    for part in text.split(";"):
        name, _, members = part.partition(":")
        if not name.strip() or not all(number.strip().isdecimal() for number in members.split(",")):
            raise ConfigError(f"group '{part}': expected a name and classes, such as vehicles:0,1,8,9")
        groups[name.strip()] = [int(number) for number in members.split(",")]
    return groups


def first_prototypes(run: FinishedRun) -> Array:
    """Those of all classes before round 1, [C, D]: they follow from the recipe."""
    rows = run.state[Part.PROTOTYPES]["mean"]
    model = {Part.BODY: {}, Part.HEAD: {"weight": np.zeros_like(rows)}}
    return run.server_half.init(model, round_context(run.recipe, 0, run.recipe.federation.min_sites))[Part.PROTOTYPES][
        "mean"
    ]


def read_shares(run: FinishedRun) -> Shares:
    """Of a run with class models; sites whose updates never counted are left out."""
    half, classes = run.server_half, range(run.recipe.classes)
    assert isinstance(half, ClasswiseMethod)  # noqa: S101  (asked for such runs)
    sites = {site: data.label_frequencies().numpy() for site, data in run.sites().items()}
    models = {site: model for site in sites if (model := run.personal(site)) is not None}
    return Shares(
        sites=list(models),
        true=np.stack([sites[site] for site in models]),
        local=np.stack([norm_shares(model[Part.HEAD]["weight"]) for model in models.values()]),
        models=np.stack([norm_shares(half.class_model(run.state, c)[Part.HEAD]["weight"]) for c in classes]),
    )


def draw_prototypes(run: FinishedRun, groups: Groups) -> Figure:
    """The first prototypes' cosines beside the last ones'."""
    matrices = [cosines(first_prototypes(run)), cosines(run.state[Part.PROTOTYPES]["mean"])]
    limit = max(float(np.abs(matrix[~np.eye(len(matrix), dtype=bool)]).max()) for matrix in matrices)
    figure = titled(4.2, f"{run.title}: cosines between the classes' prototypes")
    for axes, matrix, when in zip(
        figure.subplots(1, 2), matrices, ("before training", f"after {run.recipe.rounds} rounds"), strict=True
    ):
        image = _cosines(axes, matrix, groups, class_names(run.recipe), max(limit, 0.05))
        means = within_and_between(matrix, groups)
        means_note = f"\nmean {means[0]:+.2f} within groups, {means[1]:+.2f} between" if means else ""
        axes.set_title(f"{when}{means_note}", loc="left", fontsize=9)
    figure.colorbar(image, ax=figure.axes, shrink=0.7, pad=0.02).ax.tick_params(labelsize=8)
    return figure


def draw_shares(shares: Shares, title: str) -> Figure:
    """What sites hold above what their heads' norms say, and the class models beside both."""
    figure = titled(4.6, f"{title}: the norms of a head's rows tell which classes the model was trained on")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.12))[0]
    above, below = left.subplots(2, 1)
    most = 100 * max(shares.true.max(), shares.local.max(), shares.models.max())
    image = _shares(above, shares.true, shares.sites, most, "sites: true share of each class")
    _shares(below, shares.local, shares.sites, most, f"sites: share of the norms, mean distance {shares.gap:.2f}")
    axes = right.subplots()
    models = [f"model {c}" for c in range(len(shares.models))]
    _shares(axes, shares.models, models, most, "class models: share of the norms")
    below.set_xlabel("class", fontsize=9)
    axes.set_xlabel("class", fontsize=9)
    bar = right.colorbar(image, ax=axes, shrink=0.8, pad=0.03)
    bar.ax.tick_params(labelsize=8)
    bar.ax.set_title("%", fontsize=8)
    return figure


def _cosines(axes: Axes, matrix: Array, groups: Groups, names: Sequence[str], limit: float) -> AxesImage:
    order = [c for members in groups.values() for c in members]
    sorted_ = np.where(np.eye(len(order), dtype=bool), np.nan, matrix[np.ix_(order, order)])
    axes.set_facecolor("0.85")  # of the diagonal, which is 1
    image = axes.imshow(sorted_, cmap="RdBu_r", vmin=-limit, vmax=limit)
    ends = np.cumsum([len(members) for members in groups.values()])
    for end in ends[:-1]:
        axes.axhline(end - 0.5, color="black", linewidth=0.8)
        axes.axvline(end - 0.5, color="black", linewidth=0.8)
    if len(order) > NAMED_CLASSES:
        middles = [end - len(members) / 2 - 0.5 for end, members in zip(ends, groups.values(), strict=True)]
        axes.set_yticks(middles, list(groups), fontsize=6)
        axes.set_xticks([])
    else:
        axes.set_yticks(range(len(order)), [names[c] for c in order], fontsize=8)
        turned = 90 if max(map(len, names)) > 2 else 0
        axes.set_xticks(range(len(order)), [names[c] for c in order], fontsize=8, rotation=turned)
    return image


def _shares(axes: Axes, matrix: Array, rows: Sequence[str], most: float, title: str) -> AxesImage:
    image = axes.imshow(percent(matrix), cmap="Blues", vmin=0, vmax=most, aspect="auto")
    axes.set_title(title, loc="left", fontsize=9)
    few = len(rows) <= NAMED_CLASSES
    axes.set_yticks(range(len(rows)) if few else [], rows if few else [], fontsize=8)
    if matrix.shape[1] <= NAMED_CLASSES:
        axes.set_xticks(range(matrix.shape[1]))
    axes.tick_params(labelsize=8, length=0)
    return image
