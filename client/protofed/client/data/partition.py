"""Partition a source into sites and their test sets, and give it a long tail; Dirichlet draws are in `dirichlet`.

Pure functions of labels and a generator, NumPy only. They return indices into their arguments, sorted unless they say
otherwise; together the sites get each example once. Generators are NumPy's legacy ones, as in the released codes, whose
partitions they reproduce.
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
    class is the mean share, or drawn between a tenth of it and all of it; the group's last site takes the rest. A
    class's examples are dealt in the source's order. With `RandomState(1)` the sites are the released ones, unless the
    mean share is under ten examples: there the released code may give a site nothing, and this one does not.

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
    kept = [shuffled(labels, c, rng)[:size] for c, size in enumerate(targets)]
    return np.sort(np.concatenate([np.empty(0, np.int64), *kept]))


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
