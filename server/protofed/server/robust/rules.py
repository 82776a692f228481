"""What the robust rules compute, on numbers that fit into memory: norms [K], inner products [K, K], rows [H, D].

K sites, H holders of a class. No function calls a linear algebra library, whose results depend on its threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_high, median_low

import numpy as np

from protofed.common.payload import TINY, Array, unit

PAIR = 2
LEAST_HOLDERS = 3  # of two rows none is in the middle
STEPS = 1000  # of Weiszfeld's iteration, at most: it converges linearly
STILL = 1e-9  # change of the weights, summed, at which it has converged
# Pillutla et al.'s nu, as a share of the median distance: a point that is the centre has a finite weight.
SMOOTHING = 1e-6


def median_length(lengths: Sequence[float]) -> float:
    """The upper median of an even number, which as many honest sites reach; of two the smaller one, as for outliers."""
    return median_low(lengths) if len(lengths) == PAIR else median_high(lengths)


def clip_scales(norms: Sequence[float], factor: float) -> list[float]:
    """By which each update is scaled, [K] of 0 to 1, so that none exceeds `factor` times the cohort's median norm.

    All are 1 where the median is zero: most updates then do not say how large a change should be.
    """
    limit = factor * median_length(norms) if norms else 0.0
    return [limit / norm if 0 < limit < norm else 1.0 for norm in norms]


def squared_distances(products: Array) -> Array:
    """||x_k - x_l||^2 from the inner products of K points, [K, K] -> [K, K]."""
    squares = products.diagonal()
    return np.asarray(np.maximum(squares[:, None] + squares[None, :] - 2 * products, 0.0))


def krum_scores(products: Array, bad: int) -> Array:
    """Sum of squared distances to the K - f - 2 nearest others, [K] (Blanchard et al., NeurIPS 2017, section 4).

    Args:
        products: inner products of the updates, [K, K].
        bad: f; K >= 2 f + 3.
    """
    distances = squared_distances(products)
    np.fill_diagonal(distances, np.inf)
    nearest = np.sort(distances, axis=1)[:, : len(distances) - bad - 2]
    return np.asarray(nearest.sum(axis=1))


def krum_rejected(scores: Array, bad: int, margin: float) -> list[int]:
    """Who is not chosen: of the f largest scores those that exceed `margin` times the median of all, [K] -> indices.

    Multi-Krum (margin 0) leaves out f sites in every round, and where classes are skewed these are honest ones with
    rare classes; with a margin nobody is left out while no score stands out, nor where most updates are equal.
    """
    order = np.argsort(-scores, kind="stable")[:bad]
    limit = margin * float(np.median(scores))
    return sorted(int(k) for k in order if 0 < limit < scores[k])


def centre_weights(products: Array) -> Array:
    """Weights [K], adding up to 1, whose weighted mean of the points is their geometric median (smoothed Weiszfeld).

    Pillutla et al., IEEE TSP 2022, algorithm 2, run to its end: every iterate is a weighted mean, so the inner products
    [K, K] are all that it needs.
    """
    count = len(products)
    weights = np.full(count, 1 / count)
    # Of the point that most others are nearest to, which no minority can feign: the mean is where an attacker wants it.
    spread = float(np.median(np.sqrt(squared_distances(products)), axis=1).min())
    smallest = max(SMOOTHING * spread, TINY)
    for _ in range(STEPS):
        crossed = (products * weights).sum(axis=1)  # <x_k, z>
        squares = products.diagonal() - 2 * crossed + (crossed * weights).sum()
        distances = np.sqrt(np.maximum(squares, 0.0))
        inverse = 1 / np.maximum(distances, smallest)
        new = inverse / inverse.sum()
        moved, weights = float(np.abs(new - weights).sum()), new
        if moved < STILL:
            break
    return weights


def spherical_median(rows: Array) -> Array:
    """The direction in the middle of the rows' directions, at their median length; [H, D] -> [D] float64, H >= 3.

    The geometric median of the unit rows, brought back to the sphere. Rows of length 0 have no direction, and count for
    the length alone.
    """
    exact = rows.astype(np.float64)
    lengths = np.sqrt(np.einsum("hd,hd->h", exact, exact))
    directions = unit(exact)
    weights = centre_weights(np.einsum("hd,gd->hg", directions, directions))
    return np.asarray(unit(np.einsum("h,hd->d", weights, directions)) * np.median(lengths))


def robust_rows(by_class: Mapping[str, Sequence[Array]]) -> dict[str, Array]:
    """A row for each class that has holders enough, of the shape and dtype of theirs; {class: [...] of each holder}."""
    return {
        name: spherical_median(np.stack([row.reshape(-1) for row in rows])).astype(rows[0].dtype).reshape(rows[0].shape)
        for name, rows in by_class.items()
        if len(rows) >= LEAST_HOLDERS
    }
