"""Hold out whole groups, such as all images of one patient: no group is in two parts. Pure functions, NumPy only."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protofed.client.data.partition import Indices, Labels
from protofed.common.errors import DataError

Groups: TypeAlias = NDArray[Any]  # [N], one value an example


def hold_out(
    labels: Labels, groups: Groups, share: float, rng: np.random.Generator | np.random.RandomState
) -> tuple[Indices, Indices]:
    """Split examples into training and test set by whole groups, near to `share` of every class in the test set.

    Greedy, in random order: a group goes to the test set if that brings the classes nearer to their shares (by the sum
    of squares of the missing fractions of each class). The last group with a class stays in training.

    Args:
        labels: [N].
        groups: [N].
        share: of each class that the test set should get, 0 to 1.
        rng: draws one permutation of the groups.

    Returns:
        Indices of the training and of the test examples, sorted.

    Raises:
        DataError: no group can be held out.
    """
    _, label = np.unique(labels, return_inverse=True)
    names, group = np.unique(groups, return_inverse=True)
    counts = np.zeros((len(names), int(label.max(initial=-1)) + 1))  # [groups, C]
    np.add.at(counts, (group, label), 1)
    sizes = counts.sum(0)  # [C]
    owners = (counts > 0).sum(0)  # [C]: groups in training that have the class
    missing, taken = np.full(len(sizes), share), np.zeros(len(names), bool)
    for place in rng.permutation(len(names)):
        has_class = counts[place] > 0  # [C]
        after = missing - counts[place] / sizes
        if (owners[has_class] > 1).all() and (after**2).sum() < (missing**2).sum():
            missing, owners, taken[place] = after, owners - has_class, True
    if not taken.any():
        raise DataError(
            f"holding out {share:g} of the images by whole groups leaves no test set; expected more groups than one in "
            "some class, or a split of the files' own"
        )
    return np.flatnonzero(~taken[group]), np.flatnonzero(taken[group])


def hold_out_each(
    labels: Labels, groups: Groups, cut: list[Indices], share: float, rng: np.random.RandomState
) -> tuple[list[Indices], list[Indices]]:
    """`hold_out` for every site of a partition; the counterpart of `partition.hold_out` for data with groups.

    Args:
        labels: [N].
        groups: [N].
        cut: each site's examples.

    Returns:
        Each site's training and test examples, as sorted indices into `labels`.
    """
    train, test = list[Indices](), list[Indices]()
    for site in cut:
        train_rows, test_rows = hold_out(labels[site], groups[site], share, rng)
        train.append(np.sort(site[train_rows]))
        test.append(np.sort(site[test_rows]))
    return train, test


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
