"""How one source is cut into sites, and how it gets a long tail: NumPy only, pure functions of labels and a generator.

Every function answers with sorted indices into what it was given; together the sites hold each example once.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protofed.common.errors import DataError

Indices: TypeAlias = NDArray[np.int64]  # of examples, sorted
Labels: TypeAlias = NDArray[np.int64]  # [N]

ATTEMPTS = 1000  # draws of a whole Dirichlet partition before it counts as impossible


def dirichlet(
    labels: Labels,
    sites: int,
    beta: float,
    rng: np.random.RandomState,
    min_examples: int = 10,
    min_classes: int = 2,
) -> list[Indices]:
    """FedNH's label-skewed partition (METHODS §1.7); the smaller `beta`, the more skewed.

    With a fresh `RandomState(seed)` it deals every example to the same site as the released code with that seed,
    wherever that needs no more than its three attempts: later it accepts what it has, here the draw goes on.

    Args:
        labels: [N]; its classes are dealt in sorted order.
        sites: how many.
        beta: concentration of the symmetric Dirichlet distribution, by class over sites.
        rng: the legacy generator, for the sake of the paper's own partitions.
        min_examples: that every site has at least.
        min_classes: that every site has at least; 2 in the paper.

    Raises:
        DataError: no such partition exists, or none was found in `ATTEMPTS` draws.
    """
    if sites * min_examples > len(labels) or min_classes > len(np.unique(labels)):
        raise DataError(
            f"{len(labels)} examples of {len(np.unique(labels))} classes cannot give {sites} sites at least "
            f"{min_examples} examples and {min_classes} classes each; lower partition.sites or the minima"
        )
    rng.permutation(len(labels))  # drawn and never used by the released code: kept, for equal partitions
    for _ in range(ATTEMPTS):
        held = _draw(labels, sites, beta, rng, min_classes)  # [K, classes]
        if min(len(site) for site in held) >= min_examples and _fewest_classes(labels, held) >= min_classes:
            return held
    raise DataError(
        f"no partition of {len(labels)} examples into {sites} sites with beta {beta:g}, at least {min_examples} "
        f"examples and {min_classes} classes each in {ATTEMPTS} draws; raise partition.beta or lower the minima"
    )


def shards(labels: Labels, sites: int, shards: int, rng: np.random.RandomState) -> list[Indices]:
    """FedPRP's sharding (METHODS §2.5): every class is cut into sites * shards / classes, every site is dealt `shards`.

    A site may be dealt two shards of one class; the sites' sizes differ as the classes' do.

    Raises:
        DataError: the shards do not come out even over the classes, or a class has fewer examples than shards.
    """
    classes = np.unique(labels)
    each, odd = divmod(sites * shards, len(classes)) if len(classes) else (0, 1)
    if odd:
        raise DataError(
            f"{sites} sites of {shards} shards are {sites * shards} shards, no multiple of {len(classes)} classes; "
            "change partition.sites or partition.shards"
        )
    cut = [np.array_split(_shuffled(labels, c, rng), each) for c in classes]  # [classes, each]
    if not all(len(piece) for pieces in cut for piece in pieces):
        raise DataError(
            f"a class has fewer than {each} examples, one a shard; lower partition.sites or partition.shards"
        )
    dealt = rng.permutation(np.repeat(np.arange(len(classes)), each)).reshape(sites, shards)
    return [np.sort(np.concatenate([cut[c].pop() for c in hand])) for hand in dealt]


def by_column(values: NDArray[Any]) -> list[Indices]:
    """One site for each value of a source's site column, in sorted order of the values."""
    return [np.flatnonzero(values == value) for value in np.unique(values)]


def long_tail(labels: Labels, factor: float, rng: np.random.RandomState) -> Indices:
    """What is kept for an exponential long tail (METHODS §2.5): n_c = int(n_max * factor ** (c / (C - 1))).

    Class 0 stays the most frequent one; a class that has fewer than n_c examples keeps all of them.
    """
    sizes = np.bincount(labels)  # [C]
    wanted = long_tail_sizes(int(sizes.max(initial=0)), len(sizes), factor)
    kept = [_shuffled(labels, c, rng)[:size] for c, size in enumerate(wanted)]
    return np.sort(np.concatenate([np.empty(0, np.int64), *kept]))


def long_tail_sizes(most: int, classes: int, factor: float) -> list[int]:
    """n_c for every class c, of which class 0 has `most` examples."""
    return [int(most * factor ** (c / max(classes - 1, 1))) for c in range(classes)]


def _shuffled(labels: Labels, c: np.int64 | int, rng: np.random.RandomState) -> Indices:
    indices = np.flatnonzero(labels == c)
    rng.shuffle(indices)
    return indices


def _draw(labels: Labels, sites: int, beta: float, rng: np.random.RandomState, min_classes: int) -> list[Indices]:
    """One attempt: [K] index arrays, of any size; all empty where the proportions came out as no numbers."""
    held: list[list[Indices]] = [[] for _ in range(sites)]
    for rank, c in enumerate(np.unique(labels)):
        indices = _shuffled(labels, c, rng)
        room = np.array([sum(map(len, site)) < len(labels) / sites for site in held])  # [K]
        proportions = rng.dirichlet(np.repeat(beta, sites)) * room
        if not proportions.sum() > 0:  # a tiny beta: all mass on sites that are full
            return [np.empty(0, np.int64)] * sites
        cuts = (np.cumsum(proportions / proportions.sum()) * len(indices)).astype(int)[:-1]
        chunks = np.split(indices, cuts)
        if rank >= min_classes:
            _swap(chunks, held, min_classes)
        for site, chunk in zip(held, chunks, strict=True):
            site.extend([chunk] if len(chunk) else [])
    return [np.sort(np.concatenate([np.empty(0, np.int64), *site])) for site in held]


def _swap(chunks: list[Indices], held: list[list[Indices]], min_classes: int) -> None:
    """The released code's help for sites short of classes: the n-th of these swaps with the n-th site from the end."""
    short = [k for k, site in enumerate(held) if len(site) < min_classes]
    for place, k in enumerate(short, start=1):
        chunks[k], chunks[-place] = chunks[-place], chunks[k]


def _fewest_classes(labels: Labels, held: list[Indices]) -> int:
    return min(len(np.unique(labels[site])) for site in held)
