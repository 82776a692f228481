"""What suites of partitions share."""

from __future__ import annotations

import numpy as np

from protofed.client.data.partition import Indices, Labels


def rng(seed: int = 0) -> np.random.RandomState:
    return np.random.RandomState(seed)


def balanced(classes: int, each: int) -> Labels:
    return rng(1).permutation(np.repeat(np.arange(classes), each))


def owners(cut: list[Indices], count: int) -> Labels:
    """[N] the site of every example; fails unless each has exactly one."""
    assert np.array_equal(np.sort(np.concatenate(cut)), np.arange(count))
    owner = np.full(count, -1, dtype=np.int64)
    for site, indices in enumerate(cut):
        owner[indices] = site
    return owner


def held_classes(labels: Labels, cut: list[Indices]) -> list[set[int]]:
    return [set(labels[site].tolist()) for site in cut]
