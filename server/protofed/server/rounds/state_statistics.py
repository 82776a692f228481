"""A few numbers of a published state, kept with its round: how its prototypes lie and how far they moved."""

from __future__ import annotations

import numpy as np

from protofed.common.payload import Array, Part, Payload, Tensors
from protofed.common.tensors import unit

SHIFT, MIN_DISTANCE, COVERED = "prototype_shift", "prototype_min_distance", "classes_covered"
BLOCK = 256  # classes whose distances to all others are in memory at a time


def prototype_statistics(before: Payload | None, after: Payload) -> dict[str, float]:
    """Statistics of a new state's prototypes; what is not defined is left out (everything, without prototypes).

    The distance of two prototypes is 1 - cos, from 0 to 2; a prototype of length 0 has none.

    Args:
        before: the state that it was made from; None: it is the first.

    Returns:
        `prototype_shift`: mean distance of the prototypes to those of the same classes before;
        `prototype_min_distance`: the smallest distance between two classes';
        `classes_covered`: classes whose prototype is new or has moved, because somebody in the round had examples.
    """
    new = _by_class(after.get(Part.PROTOTYPES, {}))
    if len({row.shape for row in new.values()}) != 1:  # none, or no prototypes
        return {}
    old = _by_class((before or {}).get(Part.PROTOTYPES, {}))
    both = sorted(c for c in new if c in old and old[c].shape == new[c].shape)
    covered = 0 if before is None else sum(c not in old or not np.array_equal(old[c], new[c]) for c in new)
    values = {
        SHIFT: _mean_distance(_directions(old, both), _directions(new, both)),
        MIN_DISTANCE: _closest(_directions(new, sorted(new))),
        COVERED: float(covered),
    }
    return {name: value for name, value in values.items() if value is not None}


def _by_class(prototypes: Tensors) -> dict[int, Array]:
    """Prototype [D] by class, from one matrix [C, D] (FedNH) or a row for each class that has one (FedPRP, FedProc)."""
    if "mean" in prototypes:
        return dict(enumerate(prototypes["mean"]))
    return {int(name): row for name, row in prototypes.items() if name.isdecimal()}


def _directions(rows: dict[int, Array], classes: list[int]) -> Array:
    """Unit rows [C, D] in float64; a row of length 0 stays 0."""
    return unit(np.array([rows[c].reshape(-1) for c in classes], np.float64)) if classes else np.empty((0, 0))


def _mean_distance(old: Array, new: Array) -> float | None:
    """Between rows [C, D] of the same classes; None if no class has a direction in both."""
    both = old.any(axis=1) & new.any(axis=1)  # [C]
    if not both.any():
        return None
    cosines = np.einsum("cd,cd->c", old[both], new[both])
    return float(np.clip(1 - cosines, 0, 2).mean())


def _closest(directions: Array) -> float | None:
    """The smallest distance between two rows [C, D]; None if fewer than two have a direction."""
    nonzero = directions[directions.any(axis=1)]
    if len(nonzero) < 2:
        return None
    largest = -1.0
    for start in range(0, len(nonzero), BLOCK):
        cosines = nonzero[start : start + BLOCK] @ nonzero.T
        rows = np.arange(len(cosines))
        cosines[rows, start + rows] = -1  # a prototype is not its own neighbour
        largest = max(largest, float(cosines.max()))
    return min(2.0, max(0.0, 1 - largest))
