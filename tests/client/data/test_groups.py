"""Whole groups are held out, as near to the share of each class as they allow, and alike for equal seeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.partitions import balanced, rng

from protofed.client.data.groups import check_apart, hold_out, hold_out_each
from protofed.common.errors import DataError

LABELS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=2, max_size=80)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(pairs=LABELS, share=st.floats(0.05, 0.6), seed=st.integers(0, 5))
def test_no_group_is_in_both_parts_and_no_class_is_lost_to_training(
    pairs: list[tuple[int, int]], share: float, seed: int
) -> None:
    labels, groups = np.array(pairs).T
    try:
        train, test = hold_out(labels, groups, share, generator(seed))
    except DataError:
        return
    assert sorted([*train, *test]) == list(range(len(labels)))
    assert not set(groups[train]) & set(groups[test])
    assert set(labels[train]) == set(labels)
    assert len(test)
    again = hold_out(labels, groups, share, generator(seed))
    assert np.array_equal(train, again[0])
    assert np.array_equal(test, again[1])


def test_groups_of_one_give_every_class_its_share() -> None:
    labels = balanced(5, 40)
    train, test = hold_out(labels, np.arange(200), 0.25, generator())
    assert np.bincount(labels[test]).tolist() == [10] * 5
    assert np.array_equal(np.sort(train), train)
    assert not np.array_equal(test, hold_out(labels, np.arange(200), 0.25, generator(1))[1])


def test_patients_with_several_images_come_near_it() -> None:
    draw = generator(3)
    labels, groups = draw.choice(4, 2000, p=[0.7, 0.2, 0.07, 0.03]), draw.integers(0, 700, 2000)
    _, test = hold_out(labels, groups, 0.3, generator())
    shares = np.bincount(labels[test], minlength=4) / np.bincount(labels)
    assert np.abs(shares - 0.3).max() < 0.05


def test_the_last_group_of_a_class_stays_in_training() -> None:
    labels, groups = np.array([0, 0, 0, 0, 1, 1]), np.array(["a", "b", "c", "d", "e", "e"])
    for seed in range(20):
        train, _ = hold_out(labels, groups, 0.9, generator(seed))
        assert set(labels[train]) == {0, 1}


def test_one_group_a_class_cannot_be_held_out() -> None:
    with pytest.raises(DataError, match="by whole groups leaves no test set"):
        hold_out(np.array([0, 0, 1]), np.array(["a", "a", "b"]), 0.5, generator())
    with pytest.raises(DataError, match="leaves no test set"):
        hold_out(np.empty(0, np.int64), np.empty(0), 0.5, generator())


def test_each_site_holds_out_its_own_groups() -> None:
    labels, groups = balanced(2, 20), np.repeat(np.arange(20), 2)
    cut = [np.arange(20), np.arange(20, 40)]
    train, test = hold_out_each(labels, groups, cut, 0.3, rng())
    for site, kept, held in zip(cut, train, test, strict=True):
        assert sorted([*kept, *held]) == site.tolist()
        assert not set(groups[kept]) & set(groups[held])
        assert len(held)


def test_groups_in_two_parts_are_counted_and_not_named() -> None:
    groups = np.array(["Doe", "Doe", "Roe", "Poe"])
    check_apart(groups, [np.array([0, 1]), np.array([2]), np.array([3])], "the sites")
    with pytest.raises(DataError, match="1 groups are in more than one of the sites") as caught:
        check_apart(groups, [np.array([0, 2]), np.array([1, 3])], "the sites")
    assert "oe" not in str(caught.value)
