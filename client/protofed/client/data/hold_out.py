"""Hold a test set out of a site's own images: stratified by class, whole groups, none of a class with few images.

NumPy only. Partitions that cut one source into sites for a simulation hold out as the released codes do:
`partition.hold_out`.

In a run with `[plan.dp]` a keyed hash of a unit alone decides whether it is held out (`held_out`). A unit is a patient
with all of his images, or one image where the data have no groups. Noise bounds what one unit adds; it does not bound a
draw over all units, in which one more moves others between the sets. So no count, no order, no label and no other unit
decides there.

The key is `data.seed`, of the site's own settings. The promise holds for whoever knows it: a unit is trained on, and
then noise hides it, or it is not. A key of the state folder would move images from the test set into training when the
folder is lost, and simulations would not repeat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protofed.client.data.file_entry import DIGEST_BYTES, digest_content
from protofed.client.data.partition import Indices, Labels
from protofed.common.errors import DataError

Groups: TypeAlias = NDArray[Any]  # [N], one value an example
Units: TypeAlias = NDArray[np.str_]  # [N], names the unit of each example, in hex
_THREADS = 8
# Of a class's five test images one moves its recall by 20 points, the standard error of the recall is up to 22: with
# fewer, balanced accuracy, which weighs all classes alike, would say more about these images than about the model.
MIN_TESTED = 5
# A class below keeps all its images in training, where they are worth most: so training always gets at least as many
# as the floor of the test set.
MIN_SCORED = 2 * MIN_TESTED

Counts: TypeAlias = NDArray[np.int64]  # [C], of the classes that are present
Flags: TypeAlias = NDArray[np.bool_]  # of classes [C], likewise, or of units or examples [N]


def hold_out(
    labels: Labels, groups: Groups | None, fraction: float, rng: np.random.Generator | np.random.RandomState
) -> tuple[Indices, Indices]:
    """Split a site's examples into training and test set.

    Each class gives `fraction` of its examples, at least `MIN_TESTED` and all but `MIN_TESTED` at most; one with
    fewer than `MIN_SCORED` gives none. Groups stay whole: each class comes as near to its number as they allow, and
    one that they leave below `MIN_TESTED` gives none. Groups of one image each give the same sets as no groups. A
    fraction of 1 makes everything the test set: an evaluator's own.

    Args:
        labels: [N].
        groups: [N]; None: there are none.
        fraction: of each class, above 0.
        rng: draws one permutation, of the groups or the examples.

    Returns:
        Indices of the training and of the test examples, sorted; no test examples if no class can give
        `MIN_TESTED`.
    """
    if fraction >= 1:
        return np.empty(0, np.int64), np.arange(len(labels))
    _, label, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    targets = np.clip(
        np.rint(fraction * sizes).astype(np.int64), MIN_TESTED, np.maximum(sizes - MIN_TESTED, MIN_TESTED)
    )
    scored = sizes >= MIN_SCORED
    if groups is None:
        in_test = _draw(label, np.where(scored, targets, 0), rng.permutation(len(labels)))
    else:
        in_test = _draw_groups(label, groups, targets, scored, rng)
    return np.flatnonzero(~in_test), np.flatnonzero(in_test)


def hold_out_each(
    labels: Labels, groups: Groups | None, cut: list[Indices], fraction: float, rng: np.random.RandomState
) -> tuple[list[Indices], list[Indices]]:
    """`hold_out` for every site of a partition by the source's own column.

    Args:
        labels: [N].
        groups: [N]; None: there are none.
        cut: each site's examples.

    Returns:
        Each site's training and test examples, as sorted indices into `labels`.
    """
    train, test = list[Indices](), list[Indices]()
    for site in cut:
        own_groups = None if groups is None else groups[site]
        train_rows, test_rows = hold_out(labels[site], own_groups, fraction, rng)
        train.append(np.sort(site[train_rows]))
        test.append(np.sort(site[test_rows]))
    return train, test


def no_test_set() -> DataError:
    """The error of data that need a test set which cannot be held out; the caller raises it. It has no counts."""
    return DataError(
        f"no test set can be held out: no class has {MIN_SCORED} images and can spare {MIN_TESTED} of them for "
        "testing (groups stay whole). Add images, or choose the test set yourself: folders train and test, a "
        "column split, or test_images and test_labels"
    )


def _draw(label: Labels, targets: Counts, order: Indices) -> Flags:
    """[N], whether an example is in the test set: of each class the first `targets` in this order."""
    in_test = np.zeros(len(label), bool)
    for c, count in enumerate(targets):
        in_test[order[label[order] == c][:count]] = True
    return in_test


def _draw_groups(
    label: Labels, groups: Groups, targets: Counts, scored: Flags, rng: np.random.Generator | np.random.RandomState
) -> Flags:
    """[N], whether an example is in the test set; without the classes that whole groups leave short."""
    names, group = np.unique(groups, return_inverse=True)
    counts = np.zeros((len(names), len(targets)), np.int64)  # [groups, C]
    np.add.at(counts, (group, label), 1)
    order = rng.permutation(len(names))
    while True:
        in_test = _take_groups(counts, np.where(scored, targets, 0), order)
        short = scored & (counts[in_test].sum(0) < MIN_TESTED)
        if not short.any():
            return in_test[group]
        scored = scored & ~short


def _take_groups(counts: NDArray[np.int64], targets: Counts, order: Indices) -> Flags:
    """[groups], whether a group is in the test set.

    Greedy, in this order. First a group is taken if it brings the classes nearer to their targets, by the sum of
    squares of the missing fractions. Then a group is taken if it has a class below `MIN_TESTED`. Groups with a class
    without a target stay in training, and so does what training needs of each class.
    """
    sizes = counts.sum(0)  # [C]
    tested, in_test = np.zeros(len(sizes), np.int64), np.zeros(len(counts), bool)

    def free(place: np.int64) -> bool:
        has_class = counts[place] > 0  # [C]
        remaining = sizes - tested - counts[place]
        return not in_test[place] and bool(((targets > 0) & (remaining >= MIN_TESTED))[has_class].all())

    def nearer(place: np.int64) -> bool:
        missing, after = (targets - tested) / sizes, (targets - tested - counts[place]) / sizes
        return bool((after**2).sum() < (missing**2).sum())

    def needed(place: np.int64) -> bool:
        return bool(((counts[place] > 0) & (tested < MIN_TESTED)).any())

    for chosen in (nearer, needed):
        for place in order:
            if free(place) and chosen(place):
                tested, in_test[place] = tested + counts[place], True
    return in_test


def check_apart(groups: Groups, parts: list[Indices], of: str) -> None:
    """Check that no group is in two parts.

    Args:
        groups: [N].
        parts: indices into `groups`.
        of: what the parts are, for the message.

    Raises:
        DataError: with the number of groups that are; never their names.
    """
    names = np.concatenate([np.unique(groups[part]) for part in parts]) if parts else groups[:0]
    _, times = np.unique(names, return_counts=True)
    if crossing := int((times > 1).sum()):
        raise DataError(f"{crossing} groups are in more than one of {of}; expected each group in one")


def units_of_groups(groups: Groups) -> Units:
    """The unit of each example by its group [N]: equal for equal groups."""
    return units_of_digests(_digest(f"group {_whole(name)}".encode()) for name in groups.tolist())


def units_of_digests(digests: Iterable[bytes]) -> Units:
    """The unit of each image by its digest: equal images have one side. A new label moves no image."""
    return np.array([digest.hex() for digest in digests], dtype=f"U{2 * DIGEST_BYTES}")


def units_of_files(paths: Sequence[Path]) -> Units:
    """The unit of each file, or folder of a series, by its bytes, whatever size a run scales its image to."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return units_of_contents(list(pool.map(_of_file, paths)))


def units_of_contents(contents: Sequence[str]) -> Units:
    """The unit of each file by its `digest_content`; those that cannot be read, whose digest is empty, are one."""
    return np.array([content or _digest(b"").hex() for content in contents], dtype=f"U{2 * DIGEST_BYTES}")


def held_out(units: Units, fraction: float, seed: int, purpose: str) -> Flags:
    """Whether an example is held out: of the units this share, each by itself.

    Args:
        seed: the key.
        purpose: of the draw; another one is independent of this.
    """
    key, below = hashlib.blake2b(f"{seed}/{purpose}".encode()).digest(), round(fraction * 2**64)
    names, index = np.unique(units, return_inverse=True)
    drawn = [_number(name.encode(), key) < below for name in names.tolist()]
    return np.array(drawn, bool)[index]


def _whole(name: object) -> object:
    """A whole number by its integer: one row without a number makes the others of its column floats."""
    return int(name) if isinstance(name, float) and name.is_integer() else name


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def _number(unit: bytes, key: bytes) -> int:
    """From 0 to 2^64 - 1."""
    return int.from_bytes(hashlib.blake2b(unit, key=key, digest_size=8).digest(), "big")


def _of_file(path: Path) -> str:
    try:
        return digest_content(path)
    except OSError:  # it is left out, on whichever side
        return ""
