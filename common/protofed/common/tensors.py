"""Functions on arrays that server halves compose. Every result has the dtype of its input."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from protofed.common.payload import Array, Part, Payload, Tensors

TINY = 1e-12
BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
BLOCK = 1 << 16  # elements of a difference in memory at a time: 512 KiB in float64


def unit(rows: Array) -> Array:
    """Rows [N, D], or [D] alone, divided by their norms; a zero row stays zero."""
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(rows / np.maximum(norms, TINY), dtype=rows.dtype)


def is_buffer(name: str) -> bool:
    """Whether a tensor of a model is a statistic that training keeps, and no weight: those of PyTorch's normalisation
    layers, by the last component of the name. A server averages them; an optimiser's step means nothing to them.
    """
    return name.rpartition(".")[2] in BUFFERS


class Mean:
    """A weighted mean of payload parts, added one by one: it needs one model's memory, whatever the number of sites.

    Floating-point tensors of any shapes are averaged; of integer ones (BatchNorm's counters) it is the maximum
    (METHODS §9.9).
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = tuple(parts)
        self._sums: dict[Part, dict[str, Array]] = {}
        self._scratch: dict[tuple[tuple[int, ...], np.dtype[np.generic]], Array] = {}
        self._weight = 0.0

    def add(self, payload: Payload, weight: float = 1.0) -> None:
        """Add one payload. The caller fixes the order of payloads: floating-point sums depend on it."""
        self._weight += weight
        for part in self._parts:
            sums = self._sums.setdefault(part, {})
            for name, array in payload.get(part, {}).items():
                if array.dtype.kind != "f":
                    sums[name] = np.asarray(np.maximum(sums[name], array)) if name in sums else array.copy()
                elif name not in sums:
                    sums[name] = np.asarray(array * array.dtype.type(weight))  # NumPy makes a scalar of a 0-d product
                else:
                    sums[name] += self._weighted(array, weight)

    def result(self) -> dict[Part, Tensors]:
        """The mean of the payloads added, each tensor of its own shape; asked for once, as it takes the sums' memory.

        Raises:
            ValueError: nothing was added, or all weights were zero.
        """
        if self._weight <= 0:
            raise ValueError("a mean of no updates")
        sums, self._sums = self._sums, {}
        for total in (array for tensors in sums.values() for array in tensors.values() if array.dtype.kind == "f"):
            total /= total.dtype.type(self._weight)
        self._weight = 0.0
        return dict(sums)

    def _weighted(self, array: Array, weight: float) -> Array:
        if weight == 1.0:
            return array
        key = (array.shape, array.dtype)  # one buffer for all tensors of a shape, of all sites
        if key not in self._scratch:
            self._scratch[key] = np.empty_like(array)
        buffer = self._scratch[key]
        np.multiply(array, array.dtype.type(weight), out=buffer)
        return buffer


class HolderMeans:
    """The mean of each class's rows over the sites that have the class, each site with the same weight."""

    def __init__(self) -> None:
        self._sums: dict[str, Array] = {}
        self._holders: dict[str, int] = {}

    def add(self, rows: Tensors) -> None:
        """Add one site's rows, {class: [D]}. The caller fixes the order of sites: floating-point sums depend on it."""
        for name, row in rows.items():
            self._sums[name] = self._sums[name] + row if name in self._sums else row
            self._holders[name] = self._holders.get(name, 0) + 1

    def result(self) -> dict[str, Array]:
        """{class: [D]}, without classes that no site has."""
        return {
            name: np.asarray(total / total.dtype.type(self._holders[name]))
            for name, total in sorted(self._sums.items())
        }


def norm_of(payload: Payload, base: Payload) -> float:
    """The Euclidean norm of (payload - base) over all floating-point tensors together, of any shapes.

    A tensor counts as it is where the base has none under its path and of its shape. Computed in float64, in which no
    square of a float32 overflows; a huge float64 makes the norm infinite.
    """
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for part, tensors in payload.items():
            for name, array in tensors.items():
                if array.dtype.kind == "f":
                    total += _squares(array, base.get(part, {}).get(name))
    return math.sqrt(total)


def _squares(array: Array, base: Array | None) -> float:
    """Sum of squares, block by block: no temporary of the tensor's size, and the same sum on any number of threads."""
    flat, total = array.reshape(-1), 0.0
    origin = base.reshape(-1) if base is not None and base.shape == array.shape else None
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK].astype(np.float64)
        if origin is not None:
            block -= origin[start : start + BLOCK]
        total += float(np.einsum("i,i->", block, block))
    return total


def relative_bound(norm: float, factor: float) -> float:
    """What an update of a model of this norm may have; infinite for a model of zeros, which nothing measures by."""
    return factor * norm if norm else math.inf


def same_tensors(left: Mapping[Part, Tensors], right: Mapping[Part, Tensors]) -> bool:
    """Whether two payloads have equal tensors, of any shapes, under the same names."""
    return left.keys() == right.keys() and all(
        left[part].keys() == right[part].keys()
        and all(np.array_equal(array, right[part][name]) for name, array in left[part].items())
        for part in left
    )
