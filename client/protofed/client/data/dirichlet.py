"""The papers' label-skewed partitions in one loop: each class is dealt by a Dirichlet draw, to sites that are not full.

NumPy only, pure functions of labels and a generator.
"""

from __future__ import annotations

import numpy as np

from protofed.client.data.partition import Indices, Labels, shuffled
from protofed.common.errors import DataError

ATTEMPTS = 1000  # draws of a whole Dirichlet partition before it counts as impossible
TOGETHER = 10  # sites that `creff_dirichlet` deals to at a time


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
        sites: number of sites, K.
        beta: concentration of the symmetric Dirichlet distribution, by class over sites.
        rng: NumPy's legacy generator, which the released code draws from.
        min_examples: of every site.
        min_classes: of every site; 2 in the paper.

    Returns:
        For each of the K sites its examples, sorted.

    Raises:
        DataError: no such partition exists, or none was found in `ATTEMPTS` draws.
    """
    rng.permutation(len(labels))  # the released code draws it and never uses it; without it later draws would differ
    return [np.sort(site) for site in _drawn(labels, sites, beta, rng, min_examples, min_classes)]


def pfllib_dirichlet(
    labels: Labels, sites: int, beta: float, rng: np.random.RandomState, min_examples: int = 1
) -> list[Indices]:
    """PFLlib's label-skewed partition (METHODS §3.4) of labels [N]; arguments as `dirichlet`.

    No permutation is drawn first, and no site is helped to a second class. With `RandomState(1)` the sites are those of
    cwFedAVG's release, which asks for one example a site; later versions of PFLlib ask for 40, or half of the mean if
    that is less.

    Returns:
        For each site its examples, in the order dealt: `partition.hold_out` must permute that order to draw the
        released test sets.

    Raises:
        DataError: as `dirichlet`.
    """
    return _drawn(labels, sites, beta, rng, min_examples, min_classes=0)


def niid_bench_dirichlet(
    labels: Labels, sites: int, beta: float, rng: np.random.RandomState, min_examples: int = 10
) -> list[Indices]:
    """NIID-Bench's, MOON's and FedProc's label-skewed partition (METHODS §4.4) of labels [N].

    The draws are those of `pfllib_dirichlet`, with another default of the minimum. The released code also shuffles each
    site's examples in the end, which does not change the partition. Each site's examples are sorted.

    Raises:
        DataError: as `dirichlet`.
    """
    return [np.sort(site) for site in _drawn(labels, sites, beta, rng, min_examples, min_classes=0)]


def creff_dirichlet(labels: Labels, sites: int, beta: float, rng: np.random.RandomState) -> list[Indices]:
    """FedPRP's label-skewed partition into sites of one size (METHODS §2.5), which is that of FedDF and CReFF.

    The shuffled examples are cut into parts, one for every ten sites; the parts are dealt apart from each other, each
    until its smallest site has half of its mean. Then all that was dealt, site after site, is cut anew into equal
    sizes, so that a site may have the end of one draw and the beginning of the next. With a fresh `RandomState(seed)`
    every example goes to the same site as in the released code, which refuses fewer than ten sites: here they are one
    part.

    Args:
        labels: [N]; its classes are dealt in sorted order.
        sites: number of sites, K.
        beta: concentration of the symmetric Dirichlet distribution, by class over a part's sites.
        rng: NumPy's legacy generator, which the released code draws from.

    Returns:
        For each of the K sites its examples, sorted; sizes differ by one at most.

    Raises:
        DataError: as `dirichlet`.
    """
    if sites > len(labels):
        raise DataError(f"{len(labels)} examples cannot give {sites} sites one each; lower partition.sites")
    order = np.argsort(labels, kind="stable")
    rng.shuffle(order)
    each = int(TOGETHER / sites * len(labels))  # of a part of ten sites; the last part has the rest
    dealt = []
    for first in range(0, sites, TOGETHER):
        start = first // TOGETHER * each
        part = order[start : start + each] if first + TOGETHER < sites else order[start:]
        dealt += [part[site] for site in _part_dealt(labels, part, min(TOGETHER, sites - first), beta, rng)]
    return [np.sort(site) for site in np.array_split(np.concatenate(dealt), sites)]


def _part_dealt(labels: Labels, part: Indices, sites: int, beta: float, rng: np.random.RandomState) -> list[Indices]:
    """One part of `creff_dirichlet`, examples in random order, as indices into it."""
    of_part, fewest = labels[part], int(0.5 * len(part) / sites)
    for _ in range(attempts := 10 * ATTEMPTS):  # beta = 0.05, the paper's, takes a hundred for a part on average
        dealt = _draw(of_part, sites, beta, rng, classes=np.unique(labels), shuffle=False)
        if min(len(site) for site in dealt) >= fewest:
            return dealt
    raise DataError(
        f"no partition of {len(part)} examples into {sites} sites with beta {beta:g}, at least {fewest} examples each, "
        f"in {attempts} draws; raise partition.beta"
    )


def _drawn(
    labels: Labels, sites: int, beta: float, rng: np.random.RandomState, min_examples: int, min_classes: int
) -> list[Indices]:
    """Draw until every site has its minima; each site's examples in the order dealt."""
    minima = f"at least {min_examples} examples" + (f" and {min_classes} classes" if min_classes else "") + " each"
    if sites * min_examples > len(labels) or min_classes > len(np.unique(labels)):
        raise DataError(
            f"{len(labels)} examples of {len(np.unique(labels))} classes cannot give {sites} sites {minima}; "
            "lower partition.sites or the minima"
        )
    for _ in range(ATTEMPTS):
        dealt = _draw(labels, sites, beta, rng, min_classes)
        if min(len(site) for site in dealt) >= min_examples and _fewest_classes(labels, dealt) >= min_classes:
            return dealt
    raise DataError(
        f"no partition of {len(labels)} examples into {sites} sites with beta {beta:g}, {minima}, "
        f"in {ATTEMPTS} draws; raise partition.beta or lower the minima"
    )


def _draw(
    labels: Labels,
    sites: int,
    beta: float,
    rng: np.random.RandomState,
    min_classes: int = 0,
    classes: Labels | None = None,
    shuffle: bool = True,
) -> list[Indices]:
    """One attempt: K index arrays of any size; all empty if no site that is not full got any proportion.

    Args:
        classes: for which proportions are drawn, also where there are no examples; None: the labels' own.
        shuffle: deal a class's examples in random order, else in the order of `labels`.
    """
    dealt: list[list[Indices]] = [[] for _ in range(sites)]
    for rank, c in enumerate(np.unique(labels) if classes is None else classes):
        indices = shuffled(labels, c, rng) if shuffle else np.flatnonzero(labels == c)
        has_room = np.array([sum(map(len, site)) < len(labels) / sites for site in dealt])  # [K]
        proportions = rng.dirichlet(np.repeat(beta, sites)) * has_room
        # With a tiny beta all mass may be on full sites, and `dirichlet` itself may give NaN: both fail `> 0`.
        if not proportions.sum() > 0:
            return [np.empty(0, np.int64)] * sites
        cuts = (np.cumsum(proportions / proportions.sum()) * len(indices)).astype(int)[:-1]
        chunks = np.split(indices, cuts)
        if rank >= min_classes:
            _swap(chunks, dealt, min_classes)
        for site, chunk in zip(dealt, chunks, strict=True):
            site.extend([chunk] if len(chunk) else [])
    return [np.concatenate([np.empty(0, np.int64), *site]) for site in dealt]


def _swap(chunks: list[Indices], dealt: list[list[Indices]], min_classes: int) -> None:
    """As in the released code, the n-th site that is short of classes swaps chunks with the n-th site from the end."""
    short = [k for k, site in enumerate(dealt) if len(site) < min_classes]
    for place, k in enumerate(short, start=1):
        chunks[k], chunks[-place] = chunks[-place], chunks[k]


def _fewest_classes(labels: Labels, dealt: list[Indices]) -> int:
    return min(len(np.unique(labels[site])) for site in dealt)
