"""The update of a site that keeps what a fit learnt, for a sum in which nobody may see that it does."""

from __future__ import annotations

import numpy as np

from protofed.common.payload import Array, Part, Payload
from protofed.common.secure_sums.linear_form import ClassRows, SumForm


def as_received(payload: Payload, base: Payload, form: SumForm) -> Payload:
    """An update of the same layout as `payload` that has moved nothing.

    It has the classes that `payload` has: holders of a class are counted in the open, and what these counts lose beside
    those of another round would be this site's classes.

    Args:
        base: the update's tensors as the fit started from them.
        form: of the run's method. Shares of classes, and what the base has nothing like (a number of steps), stay;
            a class row that was not received is zero.
    """

    def unmoved(part: Part, name: str, array: Array) -> Array:
        if part is form.shares:
            return array
        if form.rows is not None and part is form.rows.part:
            received, otherwise = _row(base, form.rows, name), np.zeros_like(array)
        else:
            received, otherwise = base.get(part, {}).get(name), array
        return otherwise if received is None or received.shape != array.shape else np.asarray(received, array.dtype)

    return {
        part: {name: unmoved(part, name, array) for name, array in tensors.items()} for part, tensors in payload.items()
    }


def _row(base: Payload, rows: ClassRows, name: str) -> Array | None:
    """The row of a class as it was received, by its name or in the matrix of all; None: there is none."""
    received = base.get(rows.part, {})
    if name in received:
        return received[name]
    part, whole = rows.like
    return np.asarray(received[whole][int(name)]) if part is rows.part and whole in received else None
