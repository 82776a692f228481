"""The papers' label-skewed partitions, one loop: a Dirichlet draw deals every class, and a full site gets no more.

NumPy only, pure functions of labels and a generator.
"""

from __future__ import annotations

import numpy as np

from protofed.client.data.partition import Indices, Labels, shuffled
from protofed.common.errors import DataError

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
    rng.permutation(len(labels))  # drawn and never used by the released code: kept, for equal partitions
    return [np.sort(site) for site in _drawn(labels, sites, beta, rng, min_examples, min_classes)]


def pfllib_dirichlet(
    labels: Labels, sites: int, beta: float, rng: np.random.RandomState, min_examples: int = 1
) -> list[Indices]:
    """PFLlib's label-skewed partition (METHODS §3.4): FedNH's without what that adds.

    No permutation is drawn first and no site is helped to a second class. With `RandomState(1)` the sites are those of
    cwFedAVG's release, which asks for one example a site; later versions of PFLlib ask for 40, or half of the mean if
    that is less.

    Returns:
        In the order dealt: that is what `hold_out` has to permute for the released test sets.

    Raises:
        DataError: as `dirichlet`.
    """
    return _drawn(labels, sites, beta, rng, min_examples, min_classes=0)


def niid_bench_dirichlet(
    labels: Labels, sites: int, beta: float, rng: np.random.RandomState, min_examples: int = 10
) -> list[Indices]:
    """NIID-Bench's, MOON's and FedProc's label-skewed partition (METHODS §4.4).

    The draws are those of `pfllib_dirichlet`, the usual minimum is another. The released code shuffles each site's
    examples in the end, which decides nothing here.

    Raises:
        DataError: as `dirichlet`.
    """
    return [np.sort(site) for site in _drawn(labels, sites, beta, rng, min_examples, min_classes=0)]


def _drawn(
    labels: Labels, sites: int, beta: float, rng: np.random.RandomState, min_examples: int, min_classes: int
) -> list[Indices]:
    """Draws until every site has its minima; in the order dealt."""
    minima = f"at least {min_examples} examples" + (f" and {min_classes} classes" if min_classes else "") + " each"
    if sites * min_examples > len(labels) or min_classes > len(np.unique(labels)):
        raise DataError(
            f"{len(labels)} examples of {len(np.unique(labels))} classes cannot give {sites} sites {minima}; "
            "lower partition.sites or the minima"
        )
    for _ in range(ATTEMPTS):
        held = _draw(labels, sites, beta, rng, min_classes)  # [K, classes]
        if min(len(site) for site in held) >= min_examples and _fewest_classes(labels, held) >= min_classes:
            return held
    raise DataError(
        f"no partition of {len(labels)} examples into {sites} sites with beta {beta:g}, {minima}, "
        f"in {ATTEMPTS} draws; raise partition.beta or lower the minima"
    )


def _draw(labels: Labels, sites: int, beta: float, rng: np.random.RandomState, min_classes: int) -> list[Indices]:
    """One attempt: [K] index arrays, of any size; all empty where the proportions came out as no numbers."""
    held: list[list[Indices]] = [[] for _ in range(sites)]
    for rank, c in enumerate(np.unique(labels)):
        indices = shuffled(labels, c, rng)
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
    return [np.concatenate([np.empty(0, np.int64), *site]) for site in held]


def _swap(chunks: list[Indices], held: list[list[Indices]], min_classes: int) -> None:
    """The released code's help for sites short of classes: the n-th of these swaps with the n-th site from the end."""
    short = [k for k, site in enumerate(held) if len(site) < min_classes]
    for place, k in enumerate(short, start=1):
        chunks[k], chunks[-place] = chunks[-place], chunks[k]


def _fewest_classes(labels: Labels, held: list[Indices]) -> int:
    return min(len(np.unique(labels[site])) for site in held)
