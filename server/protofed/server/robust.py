"""What the robust rules compute: pure functions between a round's updates and a method's `aggregate`.

Some are passes over whole models, block by block: of K updates that are mapped into memory a block of each is there.
Others take numbers that fit into memory: norms [K], inner products [K, K], rows [H, D], of K sites, H contributors of a
class.

Sums are taken in the order of the updates, which their caller fixes, and in float64 but where a function says so. No
function calls a linear algebra library, whose results depend on its number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from statistics import median_high, median_low

import numpy as np

from protofed.common.payload import TINY, Array, Part, Payload, Tensors, unit

BLOCK = 1 << 19  # elements of all K slices together, 2 MiB in float32: of shorter ones the calls themselves take time
RUN = 1 << 8  # elements whose products are added up in the updates' own precision
SHORTEST = 1 << 10  # elements of a slice at least, however many there are
Centre = Callable[[Array], Array]  # [K, B] in the updates' dtype -> [B] float64; may write into its argument


def inner_products(models: Sequence[Payload], starts: Sequence[Payload], parts: Iterable[Part]) -> Array:
    """<x_k - s_k, x_l - s_l> over the floating-point tensors of the parts, [K, K] float64.

    Products add up in the models' precision over `RUN` elements, and in float64 over such runs. In float32 a product is
    right to 2^-22 of the two lengths' product (the tests compare it with float64), and takes half the time.

    Args:
        starts: of each model what it was trained from. A tensor counts as it is where its start has none of its shape.
    """
    count = len(models)
    products = np.zeros((count, count))
    for part, name in _floats(models[0], parts):
        arrays = [model[part][name].reshape(-1) for model in models]
        origins = [_origin(start, part, name, models[0][part][name].shape) for start in starts]
        dtype = np.result_type(np.float32, *{array.dtype for array in arrays})
        longest = next((end for _, end in _spans(arrays[0].size, count)), 0)
        moved = np.zeros((count, -(-longest // RUN) * RUN), dtype)
        for begin, end in _spans(arrays[0].size, count):
            length = end - begin
            moved[:, length:] = 0.0  # the rest of the last run adds nothing
            for own, array, origin in zip(moved, arrays, origins, strict=True):
                # The difference of like numbers is exact in their own type, and half the work there.
                np.subtract(array[begin:end], 0 if origin is None else origin[begin:end], out=own[:length])
            runs = moved.reshape(count, -1, RUN)[:, : -(-length // RUN)]
            for k in range(count):
                of_runs = np.einsum("ji,kji->kj", runs[k], runs[: k + 1])
                products[k, : k + 1] += of_runs.sum(axis=1, dtype=np.float64)
    return np.asarray(np.tril(products) + np.tril(products, -1).T)


def centred(models: Sequence[Payload], parts: Iterable[Part], centre: Centre) -> dict[Part, Tensors]:
    """These parts with each element the centre of the K models'; of integers the upper median. One model of memory."""
    centres: dict[Part, dict[str, Array]] = {}
    for part in parts:
        for name, first in models[0].get(part, {}).items():
            arrays = [model[part][name].reshape(-1) for model in models]
            if first.dtype.kind != "f":
                middle = np.sort(np.stack(arrays), axis=0)[len(arrays) // 2]
            else:
                middle = np.empty(first.size, first.dtype)
                for begin, end in _spans(first.size, len(arrays)):
                    middle[begin:end] = centre(np.stack([array[begin:end] for array in arrays]))
            centres.setdefault(part, {})[name] = middle.reshape(first.shape)
    return dict(centres)


def median(block: Array) -> Array:
    """[K, B] -> [B]: of an even number the mean of the two in the middle (Yin et al., ICML 2018, definition 1)."""
    return trimmed(block, (len(block) - 1) // 2)


def trimmed(block: Array, bad: int) -> Array:
    """[K, B] -> [B]: the mean without the f largest and the f smallest (Yin et al., definition 2)."""
    rows = ordered(block)
    inner = rows[bad : len(rows) - bad]
    total = inner[0].astype(np.float64)
    for row in inner[1:]:
        total += row
    return np.asarray(total / len(inner))


def weighted(block: Array, weights: Array) -> Array:
    """[K, B] by weights [K] that add up to 1 -> [B], in the block's own precision, in which the result is kept."""
    return np.asarray(np.einsum("k,ki->i", weights.astype(np.result_type(np.float32, block.dtype)), block))


def ordered(block: Array) -> list[Array]:
    """The columns of [K, B] sorted, as K rows; takes the block's memory.

    By a network of minima and maxima, some ten times as fast as `np.sort` along a first axis.
    """
    rows, scratch = list(block), np.empty_like(block[0])
    for low, high in network(len(rows)):
        np.minimum(rows[low], rows[high], out=scratch)
        np.maximum(rows[low], rows[high], out=rows[high])
        rows[low], scratch = scratch, rows[low]
    return rows


@lru_cache(maxsize=64)
def network(count: int) -> tuple[tuple[int, int], ...]:
    """Comparisons (low, high) that sort `count` numbers: Batcher's odd-even merge sort (Knuth, algorithm 5.2.2M)."""
    pairs: list[tuple[int, int]] = []
    top = 1 << max(0, (count - 1).bit_length() - 1)
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while d > 0:
            pairs += [(i, i + d) for i in range(count - d) if i & p == r]
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return tuple(pairs)


def moved(model: Payload, start: Payload, scale: float, parts: Iterable[Part]) -> dict[Part, Tensors]:
    """These parts as start + scale (model - start); a tensor that the start has not, or an integer one, stays.

    With a scale of 0 to 1 it lies between the two, so that a running variance stays one.
    """
    return {
        part: {name: _between(array, start, part, name, scale) for name, array in model[part].items()}
        for part in parts
        if part in model
    }


def _between(array: Array, start: Payload, part: Part, name: str, scale: float) -> Array:
    origin = _origin(start, part, name, array.shape)
    if array.dtype.kind != "f" or origin is None:
        return array
    flat, between = array.reshape(-1), np.empty(array.size, array.dtype)
    for begin, end in _spans(flat.size, 1):
        from_ = origin[begin:end].astype(np.float64)
        between[begin:end] = from_ + scale * (flat[begin:end] - from_)
    return between.reshape(array.shape)


def _origin(start: Payload, part: Part, name: str, shape: tuple[int, ...]) -> Array | None:
    array = start.get(part, {}).get(name)
    return None if array is None or array.shape != shape else array.reshape(-1)


def _floats(model: Payload, parts: Iterable[Part]) -> Iterator[tuple[Part, str]]:
    for part in parts:
        yield from ((part, name) for name, array in model.get(part, {}).items() if array.dtype.kind == "f")


def _spans(size: int, count: int) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of blocks of `size` elements; `count` blocks are in memory together."""
    length = max(SHORTEST, BLOCK // count)
    for begin in range(0, size, length):
        yield begin, min(begin + length, size)


PAIR = 2
MIN_CONTRIBUTORS = 3  # of two rows none is in the middle
STEPS = 1000  # of Weiszfeld's iteration, at most: it converges linearly
STILL = 1e-9  # change of the weights, summed, at which it has converged
# Pillutla et al.'s nu, as a share of the median distance: a point that is the centre has a finite weight.
SMOOTHING = 1e-6


def median_length(lengths: Sequence[float]) -> float:
    """The upper median of an even number, which as many honest sites reach; of two the smaller one, as for outliers."""
    return median_low(lengths) if len(lengths) == PAIR else median_high(lengths)


def clip_scales(norms: Sequence[float], factor: float) -> list[float]:
    """The factor that scales each update, [K] of 0 to 1, so that none exceeds `factor` times the cohort's median norm.

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

    Multi-Krum itself leaves out f sites in every round. Where classes are skewed, these are honest sites with rare
    classes. With a margin nobody is left out while no score stands out, nor where most updates are equal.
    """
    order = np.argsort(-scores, kind="stable")[:bad]
    limit = margin * float(np.median(scores))
    return sorted(int(k) for k in order if 0 < limit < scores[k])


def centre_weights(products: Array) -> Array:
    """Weights [K], adding up to 1, whose weighted mean of the points is their geometric median (smoothed Weiszfeld).

    Pillutla et al., IEEE TSP 2022, algorithm 2, run to its end. Every iterate is a weighted mean, so it needs only the
    inner products [K, K].
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
    """A row for each class with contributors enough, of their shape and dtype; {class: [...] of each contributor}."""
    return {
        name: spherical_median(np.stack([row.reshape(-1) for row in rows])).astype(rows[0].dtype).reshape(rows[0].shape)
        for name, rows in by_class.items()
        if len(rows) >= MIN_CONTRIBUTORS
    }
