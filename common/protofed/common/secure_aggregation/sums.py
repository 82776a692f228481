"""What a server computes from an opened sum: means, class rows and mixtures, never what one site sent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from protofed.common.errors import StateError
from protofed.common.payload import Array, Part, Payload, Tensors
from protofed.common.secure_aggregation.fixed_point import FixedPoint
from protofed.common.secure_aggregation.linear_form import HOLDERS, MASS, MEAN, MIXTURE, ROWS, WEIGHT, SumLayout


@dataclass(frozen=True)
class Sums:
    """The sums of one round.

    Attributes:
        numbers: [N] float64, in the order of the layout.
    """

    layout: SumLayout
    numbers: Array

    @classmethod
    def opened(cls, layout: SumLayout, total: Array, fixed_point: FixedPoint) -> Sums:
        """Those of a total [N] uint64."""
        return cls(layout, fixed_point.decoded(total))

    @property
    def weight(self) -> float:
        """What the weights of all means add up to: of uniform ones, how many sites were summed."""
        return float(self._tensors.get(WEIGHT, np.zeros(())))

    def mean(self, part: Part) -> dict[str, Array]:
        """The (weighted) mean of a part's tensors, each of its own shape and dtype; integer ones are not there.

        Raises:
            StateError: nothing was summed, or all weights were zero.
        """
        if not (weight := self.weight) > 0:
            raise StateError("a secure sum of no updates: its weights add up to nothing")
        return {name: (total / weight).astype(dtype) for name, total, dtype in self._of(f"{MEAN}{part}/")}

    def averaged(self, state: Payload) -> dict[Part, Tensors]:
        """All parts of which there are means, with the state's own integer tensors (BatchNorm's counters)."""
        return {part: {**state[part], **self.mean(part)} for part in self.layout.form.means if part in state}

    def row_means(self) -> dict[str, Array]:
        """The mean row, [D] or [C, D], over its holders by class; classes that nobody holds, or too few, are absent."""
        holders, rows = self._tensors[HOLDERS], self._tensors[ROWS]
        dtype = next(field.dtype for field in self.layout.fields if field.key == ROWS)
        return {str(c): (rows[c] / holders[c]).astype(dtype) for c in np.flatnonzero(holders > 0)}

    def mixture_mass(self) -> Array:
        """What the sites' shares of each class add up to, [C] float64; 0: nobody holds it, or too few."""
        return self._tensors[MASS]

    def mixtures(self, part: Part) -> dict[str, Array]:
        """The mean of a part's tensors by the sites' shares of each class, [C, ...]; zeros for a class without mass."""
        mass = self.mixture_mass()
        divisor = np.where(mass > 0, mass, 1.0)
        return {
            name: (total / divisor.reshape(-1, *(1,) * (total.ndim - 1))).astype(dtype)
            for name, total, dtype in self._of(f"{MIXTURE}{part}/")
        }

    @cached_property
    def _tensors(self) -> dict[str, Array]:
        return self.layout.named(self.numbers)

    def _of(self, prefix: str) -> list[tuple[str, Array, str]]:
        """Name, sum and dtype of the tensors whose keys begin like this."""
        fields = [field for field in self.layout.fields if field.key.startswith(prefix)]
        return [(field.key.removeprefix(prefix), self._tensors[field.key], field.dtype) for field in fields]
