"""A site's own statistics of batch normalisation, where the recipe keeps them local: `plan.buffers` (METHODS §9.9).

Weights are shared and statistics are not, as in SiloBN (Andreux et al., DCL 2020). A site sends its statistics with the
body all the same: their mean is the global model's, which would predict nothing without. Whatever the method, it is
handed what the server sent with this site's own statistics in place, those that it sent last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from protofed.client.training.context import FitContext
from protofed.common.payload import Array, Part, Payload, Tensors, is_buffer

PREFIX = "buffers."  # of their names in the site's memory: `buffers.body.bn1.running_mean`
MODEL = (Part.BODY, Part.HEAD)
STACKS = (Part.CLASS_MODELS, Part.SITE_MODELS)  # whose tensors are named by both


def with_own_buffers(received: Payload, local: FitContext) -> Payload:
    """What the method installs and trains from; what was received, before this site has sent any.

    Class models, of which a site makes its own mixture, and models of other sites have them in each row [R, ...].
    """
    own = _remembered(local.memory)
    return _WithOwn(received, own) if local.plan.buffers == "local" and own else received


def memory_with_buffers(local: FitContext, update: Payload, before: Payload) -> Payload:
    """The memory to keep after a fit: the method's, and the statistics of its update.

    Args:
        before: the memory before the fit, whose statistics stay where the update has none.
    """
    if local.plan.buffers != "local":
        return local.memory
    sent = {
        f"{PREFIX}{part}.{name}": array
        for part in MODEL
        for name, array in update.get(part, {}).items()
        if is_buffer(name)
    }
    own = {PREFIX + path: array for path, array in _remembered(before).items()} | sent
    return {**local.memory, Part.PRIVATE: {**local.memory.get(Part.PRIVATE, {}), **own}} if own else local.memory


class _WithOwn(Mapping[Part, Tensors]):
    """What was received, with own statistics in place as a part is looked at: an export reads no more than it needs."""

    def __init__(self, received: Payload, own: Mapping[str, Array]) -> None:
        self._received, self._own = received, own

    def __getitem__(self, part: Part) -> Tensors:
        tensors = self._received[part]
        if part in MODEL:
            return _replaced(tensors, self._own, f"{part}.")
        return _replaced(tensors, self._own) if part in STACKS else tensors

    def __iter__(self) -> Iterator[Part]:
        return iter(self._received)

    def __len__(self) -> int:
        return len(self._received)


def _remembered(memory: Payload) -> dict[str, Array]:
    """By part and name, as `body.bn1.running_mean`."""
    private = memory.get(Part.PRIVATE, {})
    return {name.removeprefix(PREFIX): array for name, array in private.items() if name.startswith(PREFIX)}


def _replaced(tensors: Tensors, own: Mapping[str, Array], prefix: str = "") -> Tensors:
    """The tensors [...] with own ones in place of those that end in their shape."""

    def chosen(name: str, array: Array) -> Array:
        mine = own.get(prefix + name)
        if mine is None or array.shape[array.ndim - mine.ndim :] != mine.shape:
            return array
        return np.array(np.broadcast_to(mine, array.shape))

    return {name: chosen(name, array) for name, array in tensors.items()}
