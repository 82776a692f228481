"""The update of a site that keeps all that a fit learnt, for a sum that nobody may see it in."""

from __future__ import annotations

import numpy as np

from protofed.common.payload import Array, Part, Payload
from protofed.common.secure_sums.linear_form import SumForm


def as_received(payload: Payload, base: Payload, form: SumForm) -> Payload:
    """An update of the same layout as `payload` that has moved nothing, and tells of no class.

    Args:
        base: the update's tensors as the fit started from them; what it lacks (a number of steps) stays as it is.
        form: of the run's method: class rows are left out, and shares of classes are zero, as of a site with none.
    """
    rows = None if form.rows is None else form.rows.part

    def unmoved(part: Part, name: str, array: Array) -> Array:
        if part is form.shares:
            return np.zeros_like(array)
        received = base.get(part, {}).get(name)
        return array if received is None or received.shape != array.shape else received

    return {
        part: {} if part is rows else {name: unmoved(part, name, array) for name, array in tensors.items()}
        for part, tensors in payload.items()
    }
