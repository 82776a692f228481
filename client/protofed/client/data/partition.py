"""Partition a source into sites and their test sets, and give it a long tail.

Pure functions of labels and a generator, NumPy only. They return indices into their arguments, sorted unless they say
otherwise; together the sites get each example once. Generators are NumPy's legacy ones, as in the released codes, whose
partitions they reproduce. The papers' label-skewed partitions are one loop: each class is dealt by a Dirichlet draw, to
sites that are not full.
"""

from __future__ import annotations

from math import ceil
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protofed.common.errors import DataError

Indices: TypeAlias = NDArray[np.int64]  # of examples
Labels: TypeAlias = NDArray[np.int64]  # [N]


def pathological(
    labels: Labels, sites: int, classes_each: int, balanced: bool, rng: np.random.RandomState
) -> list[Indices]:
    """PFLlib's pathological split (METHODS §3.4): sites and classes are taken in order, in groups.

    The first group of sites divides the first `classes_each` classes among its sites, and so on. A site's share of a
    class is the mean share, or drawn between a tenth of the mean share and all of it. The group's last site takes the
    rest. A class's examples are dealt in the source's order. With `RandomState(1)` the sites are the released ones,
    unless the mean share is under ten examples. Then the released code may give a site nothing, and this code does not.

    Args:
        labels: [N].
        sites: number of sites, K.
        classes_each: classes of each site.
        balanced: equal shares instead of drawn ones.

    Returns:
        For each of the K sites its examples, in the order dealt, as `pfllib_dirichlet`.

    Raises:
        DataError: the groups do not come out even, or a class has too few examples for its group.
    """
    classes = np.unique(labels)
    group, odd = divmod(sites * classes_each, len(classes)) if len(classes) else (0, 1)  # sites that share a class
    if odd or len(classes) % classes_each:
        raise DataError(
            f"{sites} sites of {classes_each} classes each do not divide {len(classes)} classes evenly; expected "
            "classes a multiple of partition.classes_each, and partition.sites one of classes / classes_each"
        )
    dealt: list[list[Indices]] = [[] for _ in range(sites)]
    for rank, c in enumerate(classes):
        first = rank // classes_each * group
        indices = np.flatnonzero(labels == c)
        cuts = np.cumsum(_shares(len(indices), group, balanced, rng))
        for site, chunk in zip(dealt[first : first + group], np.split(indices, cuts), strict=True):
            site.append(chunk)
    return [np.concatenate(site) for site in dealt]


def shards(labels: Labels, sites: int, shards: int, rng: np.random.RandomState) -> list[Indices]:
    """FedPRP's sharding (METHODS §2.5): every class is cut into sites * shards / classes, every site is dealt `shards`.

    A site may be dealt two shards of one class; the sites' sizes differ as the classes' do.

    Args:
        labels: [N].
        sites: number of sites, K.
        shards: shards of each site.

    Returns:
        For each of the K sites its examples.

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
    cut = [np.array_split(shuffled(labels, c, rng), each) for c in classes]  # [classes, each]
    if not all(len(piece) for pieces in cut for piece in pieces):
        raise DataError(
            f"a class has fewer than {each} examples, one a shard; lower partition.sites or partition.shards"
        )
    dealt = rng.permutation(np.repeat(np.arange(len(classes)), each)).reshape(sites, shards)
    return [np.sort(np.concatenate([cut[c].pop() for c in hand])) for hand in dealt]


def by_column(values: NDArray[Any]) -> list[Indices]:
    """One site for each value of a source's site column [N], in sorted order of the values."""
    return [np.flatnonzero(values == value) for value in np.unique(values)]


def hold_out(cut: list[Indices], share: float, rng: np.random.RandomState) -> tuple[list[Indices], list[Indices]]:
    """Split every site's examples into training and test examples, as scikit-learn's train_test_split (METHODS §3.4).

    After `pfllib_dirichlet` or `pathological`, and with the same generator, the test sets are those of the released
    code.

    Args:
        cut: each site's examples, in the order that the permutation is applied to.
        share: of the test set, 0 to 1; rounded up to whole examples.
        rng: draws one permutation for each site.

    Returns:
        Each site's training and test examples.

    Raises:
        DataError: a site has nothing left to train on.
    """
    train, test = [], []
    for site in cut:
        count = ceil(share * len(site))
        if count >= len(site):
            raise DataError(
                f"holding out {share:g} of a site's {len(site)} examples leaves none to train on; "
                "lower partition.sites or data.local_test_fraction"
            )
        order = rng.permutation(len(site))
        test.append(np.sort(site[order[:count]]))
        train.append(np.sort(site[order[count:]]))
    return train, test


def by_class(labels: Labels, cut: list[Indices], test_labels: Labels, rng: np.random.RandomState) -> list[Indices]:
    """Divide each class of a test set equally among the sites that train on it (FedPRP's A_L, METHODS §2.5).

    Parts differ by at most one example; test examples of a class that no site has are left out.

    Args:
        labels: [N], of the training examples.
        cut: each site's training examples.
        test_labels: [T].
        rng: shuffles each class before it is divided.

    Returns:
        For each site its indices into the test set.
    """
    classes_of_sites = [np.unique(labels[site]) for site in cut]
    dealt = [[np.empty(0, np.int64)] for _ in cut]
    for c in np.intersect1d(labels, test_labels):
        owners = [site for site, classes in zip(dealt, classes_of_sites, strict=True) if c in classes]
        parts = np.array_split(shuffled(test_labels, c, rng), len(owners))
        for site, part in zip(owners, parts, strict=True):
            site.append(part)
    return [np.sort(np.concatenate(site)) for site in dealt]


def long_tail(labels: Labels, factor: float, rng: np.random.RandomState) -> Indices:
    """The examples to keep for an exponential long tail (METHODS §2.5): n_c = int(n_max * factor ** (c / (C - 1))).

    Class 0 stays the most frequent one; a class with fewer than n_c examples keeps all of them.

    Args:
        labels: [N].
        factor: n_{C-1} / n_0, between 0 and 1.
    """
    sizes = np.bincount(labels)  # [C]
    targets = long_tail_sizes(int(sizes.max(initial=0)), len(sizes), factor)
    chosen = [shuffled(labels, c, rng)[:size] for c, size in enumerate(targets)]
    return np.sort(np.concatenate([np.empty(0, np.int64), *chosen]))


def long_tail_sizes(most: int, classes: int, factor: float) -> list[int]:
    """n_c of `long_tail` for every class c; class 0 has `most` examples."""
    return [int(most * factor ** (c / max(classes - 1, 1))) for c in range(classes)]


def shuffled(labels: Labels, c: np.int64 | int, rng: np.random.RandomState) -> Indices:
    """The examples of class `c`, in random order."""
    indices = np.flatnonzero(labels == c)
    rng.shuffle(indices)
    return indices


def _shares(count: int, sites: int, balanced: bool, rng: np.random.RandomState) -> list[int]:
    """Examples of one class for each of its sites but the last, which takes the rest."""
    mean = count / sites
    if mean < 1:
        raise DataError(f"a class's {count} examples are too few for its {sites} sites; lower partition.sites")
    if balanced:
        return [int(mean)] * (sites - 1)
    low = max(int(mean / 10), 1)
    shares: list[int] = rng.randint(low, max(int(mean), low + 1), sites - 1).tolist()
    return shares


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

    With a fresh `RandomState(seed)` it deals every example to the same site as the released code. This holds if that
    code needs no more than its three attempts. After these it accepts the last draw; here the draw goes on.

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
    cwFedAVG's release, which asks for one example a site. Later versions of PFLlib ask for 40, or half of the mean if
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

    The shuffled examples are cut into parts, one for every ten sites. Each part is dealt by itself until its smallest
    site has half of its mean. Then all dealt examples, site after site, are cut again into equal sizes. A site may get
    the end of one draw and the beginning of the next. With a fresh `RandomState(seed)` every example goes to the same
    site as in the released code. That code refuses fewer than ten sites; here they are one part.

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
