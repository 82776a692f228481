"""Verbs on arrays that server halves compose. Every result has the dtype of what went in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from protofed.common.payload import Array, Part, Payload, Tensors

TINY = 1e-12


def unit(rows: Array) -> Array:
    """Rows [N, D], or [D] alone, divided by their norms; a zero row stays zero."""
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(rows / np.maximum(norms, TINY), dtype=rows.dtype)


class Mean:
    """A weighted mean of payload parts, folded one at a time: one model of memory, whatever the number of sites.

    Floating-point tensors are averaged; integer ones (BatchNorm's counters) take the maximum (METHODS §9.9).
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = tuple(parts)
        self._sums: dict[Part, dict[str, Array]] = {}
        self._scratch: dict[tuple[tuple[int, ...], np.dtype[np.generic]], Array] = {}
        self._weight = 0.0

    def add(self, payload: Payload, weight: float = 1.0) -> None:
        """Fold one payload in; the caller fixes the order."""
        self._weight += weight
        for part in self._parts:
            sums = self._sums.setdefault(part, {})
            for name, array in payload.get(part, {}).items():
                if array.dtype.kind != "f":
                    sums[name] = np.asarray(np.maximum(sums[name], array)) if name in sums else array.copy()
                elif name not in sums:
                    sums[name] = np.asarray(array * array.dtype.type(weight))  # a product of 0-d arrays is none
                else:
                    sums[name] += self._weighted(array, weight)

    def result(self) -> dict[Part, Tensors]:
        """The mean of what was added.

        Raises:
            ValueError: nothing was added, or all weights were zero.
        """
        if self._weight <= 0:
            raise ValueError("a mean of no updates")
        return {part: {name: self._divided(array) for name, array in s.items()} for part, s in self._sums.items()}

    def _divided(self, total: Array) -> Array:
        return np.asarray(total / total.dtype.type(self._weight)) if total.dtype.kind == "f" else total

    def _weighted(self, array: Array, weight: float) -> Array:
        if weight == 1.0:
            return array
        key = (array.shape, array.dtype)
        if key not in self._scratch:
            self._scratch[key] = np.empty_like(array)
        buffer = self._scratch[key]
        np.multiply(array, array.dtype.type(weight), out=buffer)
        return buffer


class HolderMeans:
    """By class, the mean of the rows of the sites that hold it, every site counting alike."""

    def __init__(self) -> None:
        self._sums: dict[str, Array] = {}
        self._holders: dict[str, int] = {}

    def add(self, rows: Tensors) -> None:
        """One site's rows, {class: [D]}; the caller fixes the order."""
        for name, row in rows.items():
            self._sums[name] = self._sums[name] + row if name in self._sums else row
            self._holders[name] = self._holders.get(name, 0) + 1

    def result(self) -> dict[str, Array]:
        """{class: [D]}; a class that nobody holds is not there."""
        return {
            name: np.asarray(total / total.dtype.type(self._holders[name]))
            for name, total in sorted(self._sums.items())
        }


def same_tensors(left: Mapping[Part, Tensors], right: Mapping[Part, Tensors]) -> bool:
    """Whether two payloads hold the same numbers under the same names."""
    return left.keys() == right.keys() and all(
        left[part].keys() == right[part].keys()
        and all(np.array_equal(array, right[part][name]) for name, array in left[part].items())
        for part in left
    )
