"""The norm bound of a secure run, kept by the site: nobody else can see how far it moves the model."""

from __future__ import annotations

import numpy as np

from protofed.common.config.recipe import Federation
from protofed.common.payload import NOT_A_MOVE, Array, Payload
from protofed.common.tensors import norm_of, relative_bound


def within_bounds(payload: Payload, base: Payload, rules: Federation) -> Payload:
    """The update, moved as far from `base` as the recipe lets a site move it, in the same direction.

    The norm is the server's of a run without secure sums: of (payload - base), or of the tensor itself where the base
    has none. What says who counts, and not how far, stays as it is.

    Args:
        base: the model that the fit started from.
    """
    moving = {part: tensors for part, tensors in payload.items() if part not in NOT_A_MOVE}
    most = min(rules.max_update_norm, relative_bound(norm_of(base, {}), rules.max_relative_norm))
    norm = norm_of(moving, base)
    if not norm > most:  # NaN is refused by the policy, by name
        return payload
    scaled = {
        part: {name: _towards(base.get(part, {}).get(name), array, most / norm) for name, array in tensors.items()}
        for part, tensors in moving.items()
    }
    return {**payload, **scaled}


def _towards(origin: Array | None, array: Array, share: float) -> Array:
    """This share of the way from the origin; integer tensors as they are."""
    if array.dtype.kind != "f":
        return array
    start = origin.astype(np.float64) if origin is not None and origin.shape == array.shape else 0.0
    return np.asarray(start + share * (array.astype(np.float64) - start), dtype=array.dtype)
