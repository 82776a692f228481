"""Unit vectors that are as far apart as can be: eq. (1) of FedNH (METHODS §1.3). All give [C, D] float64 rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protofed.server.method import unit

Rows = NDArray[np.float64]


def maxsep(classes: int, features: int, rng: np.random.Generator) -> Rows:
    """Rows [C, D] of unit norm whose smallest distance is the largest possible, randomly rotated.

    Exact for C <= D + 1 (regular simplex), D = 2 (regular polygon) and D + 2 <= C <= 2 D (Rankin: rows of
    {+-e_i}, smallest distance sqrt(2)). For more classes the rows are optimised numerically.
    """
    if classes <= features + 1:
        rows = _simplex(classes, features)
    elif features == 2:
        angles = 2 * np.pi * np.arange(classes) / classes
        rows = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    elif classes <= 2 * features:
        rows = np.concatenate([np.eye(features), -np.eye(features)])[:classes]
    else:
        return _optimised(classes, features, rng)
    return rows @ _rotation(features, rng)


def orthogonal(classes: int, features: int, rng: np.random.Generator) -> Rows:
    """The released code's start, rows [C, D]: orthonormal, or for C > D with orthonormal columns."""
    size = max(classes, features)
    return _rotation(size, rng)[:classes, :features]


def smallest_distance(rows: Rows) -> float:
    """The Euclidean distance of the closest pair of rows [C, D]."""
    distances = np.linalg.norm(rows[:, None] - rows[None], axis=-1)
    return float(distances[~np.eye(len(rows), dtype=bool)].min())


def _simplex(classes: int, features: int) -> Rows:
    """C unit vectors in C - 1 dimensions with equal distances, padded with zeros to D."""
    centred = np.eye(classes) - 1 / classes  # rank C - 1: all rows lie in the plane sum(x) = 0
    basis = np.linalg.svd(centred)[2][: classes - 1]
    rows = np.zeros((classes, features))
    rows[:, : classes - 1] = unit(centred @ basis.T)
    return rows


def _rotation(size: int, rng: np.random.Generator) -> Rows:
    """A random orthogonal matrix; the signs make the draw uniform."""
    q, r = np.linalg.qr(rng.standard_normal((size, size)))
    return np.asarray(q * np.sign(np.diag(r)))


def _optimised(classes: int, features: int, rng: np.random.Generator, steps: int = 2000) -> Rows:
    """Projected gradient descent on log-sum-exp of the negative distances, sharpened as it goes."""
    rows: Rows = unit(rng.standard_normal((classes, features)))
    best, best_distance = rows, 0.0
    for step in range(steps):
        distances = np.sqrt(np.maximum(2 - 2 * rows @ rows.T, 1e-12)) + 4 * np.eye(
            classes
        )  # no row is its own neighbour
        if distances.min() > best_distance:
            best, best_distance = rows, float(distances.min())
        sharpness = 10.0 * 100.0 ** (step / steps)
        pull = np.exp(-sharpness * (distances - distances.min())) / distances
        push = rows * pull.sum(axis=1, keepdims=True) - pull @ rows  # sum_j pull_ij (x_i - x_j)
        rows = unit(rows + 0.03 * (1 - step / steps) * best_distance * push / max(float(np.abs(push).max()), 1e-12))
    return best
