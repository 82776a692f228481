"""Holding out whole groups, as all images of one patient: no group is in two parts. NumPy only, pure functions."""

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
    """Training and test examples, as near as whole groups come to `share` of every class in the test set.

    Groups are offered in random order, and one is taken where that brings the classes nearer to their shares (least
    squares of what is missing, as parts of each class); the last group that holds a class stays in training.

    Args:
        labels: [N].
        groups: [N].
        share: of the test set.
        rng: draws one permutation of the groups.

    Returns:
        Sorted indices.

    Raises:
        DataError: no group can be held out.
    """
    _, label = np.unique(labels, return_inverse=True)
    names, group = np.unique(groups, return_inverse=True)
    counts = np.zeros((len(names), int(label.max(initial=-1)) + 1))  # [groups, C]
    np.add.at(counts, (group, label), 1)
    sizes = counts.sum(0)  # [C]
    owners = (counts > 0).sum(0)  # [C]: groups in training that hold the class
    missing, taken = np.full(len(sizes), share), np.zeros(len(names), bool)
    for place in rng.permutation(len(names)):
        held = counts[place] > 0
        after = missing - counts[place] / sizes
        if (owners[held] > 1).all() and (after**2).sum() < (missing**2).sum():
            missing, owners, taken[place] = after, owners - held, True
    if not taken.any():
        raise DataError(
            f"holding out {share:g} of the images by whole groups leaves no test set; expected more groups than one in "
            "some class, or a split of the files' own"
        )
    return np.flatnonzero(~taken[group]), np.flatnonzero(taken[group])


def hold_out_each(
    labels: Labels, groups: Groups, cut: list[Indices], share: float, rng: np.random.RandomState
) -> tuple[list[Indices], list[Indices]]:
    """Every site's part in two, as `hold_out`; the counterpart of `partition.hold_out`."""
    train, test = list[Indices](), list[Indices]()
    for site in cut:
        kept, held = hold_out(labels[site], groups[site], share, rng)
        train.append(np.sort(site[kept]))
        test.append(np.sort(site[held]))
    return train, test


def check_apart(groups: Groups, parts: list[Indices], of: str) -> None:
    """That no group is in two parts.

    Args:
        groups: [N].
        parts: rows of it.
        of: what the parts are, for people.

    Raises:
        DataError: with the count of those that are.
    """
    held = np.concatenate([np.unique(groups[part]) for part in parts]) if parts else groups[:0]
    _, times = np.unique(held, return_counts=True)
    if crossing := int((times > 1).sum()):
        raise DataError(f"{crossing} groups are in more than one of {of}; expected each group in one")
