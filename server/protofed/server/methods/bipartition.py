"""How CFL splits a cluster: by the cosines between its sites' updates (METHODS §5.18)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from protofed.server.method import Array, Payload
from protofed.server.methods.site_rows import parameters

Linkage: TypeAlias = Literal["single", "complete"]


def inner_products(model: Payload, updates: Sequence[Payload]) -> Array:
    """<dW_k, dW_l> of m updates of one model, [m, m] float64; its mean is ||mean dW||^2."""
    products = np.zeros((len(updates), len(updates)))
    for part, tensors in parameters(model).items():
        for name, origin in tensors.items():
            moved = [(update[part][name].astype(np.float64) - origin).reshape(-1) for update in updates]
            products += np.stack(moved) @ np.stack(moved).T
    return products


def bipartition(similarity: Array, linkage: Linkage) -> list[list[int]]:
    """The two clusters that are left when of m the two most similar ones are merged, again and again; [m, m].

    "single": two clusters are as similar as their nearest members, so the greatest similarity between the two that are
    left is as small as it can be (Algorithm 1); "complete": as their farthest members.
    """
    parts, near = [[k] for k in range(len(similarity))], np.array(similarity, np.float64)
    np.fill_diagonal(near, -np.inf)
    while len(parts) > 2:
        into, gone = sorted(divmod(int(near.argmax()), len(parts)))  # equal ones: the first
        near[into] = near[:, into] = (np.maximum if linkage == "single" else np.minimum)(near[into], near[gone])
        near[into, into] = -np.inf
        near = np.delete(np.delete(near, gone, 0), gone, 1)
        parts[into] = sorted(parts[into] + parts.pop(gone))
    return parts
