"""Models as rows of one matrix, and mixtures of them: class models of cwFedAVG as factors (METHODS §3).

A class model is a row of Q [C, R] over R models of sites. Kept like this, a round costs O(R P) in time and memory,
whatever the number of classes. A class model is made only when someone asks for it. Tensors of a part whose names begin
with no part of a model are a method's own, and belong to no row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from protofed.server.method import Array, Mean, Part, Payload, Tensors

MODEL = (Part.BODY, Part.HEAD)
FACTORS = "factors"  # Q [C, R]: class model j is sum_r Q[j, r] * row r


def stacked(models: Sequence[Payload], parts: Iterable[Part]) -> dict[str, Array]:
    """These parts of R models as tensors [R, ...] of one part, named `body.conv1.weight`, ..."""
    names = [(part, name) for part in parts for name in models[0][part]]
    return {f"{part}.{name}": np.stack([model[part][name] for model in models]) for part, name in names}


def row(rows: Tensors, r: int) -> dict[Part, dict[str, Array]]:
    """The r-th of R models that `stacked` put into tensors [R, ...]."""
    model: dict[Part, dict[str, Array]] = {}
    for path, stack in rows.items():
        part, _, name = path.partition(".")
        if part in MODEL:
            model.setdefault(Part(part), {})[name] = np.asarray(stack[r])  # of a vector it is no array
    return model


def mixed(rows: Tensors, weights: Array) -> Payload:
    """The mean of the stacked models by weights [R], not all zero."""
    mean = Mean(row(rows, 0))
    for r in np.flatnonzero(weights):
        mean.add(row(rows, int(r)), float(weights[r]))
    return mean.result()


def distribution(shares: Array) -> Array:
    """[C], not below zero and adding up to 1, whatever a site says; all zero, if it says nothing."""
    positive: Array = np.maximum(shares.astype(float), 0.0)
    if not positive.any():
        return positive
    relative = positive / positive.max()  # neither too small nor too large to be added up
    return np.asarray(relative / relative.sum())
