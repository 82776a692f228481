"""A test set is stratified with a floor for each class; rare classes stay in training, groups stay whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.partitions import balanced, rng

from protofed.client.data.hold_out import MIN_SCORED, MIN_TESTED, hold_out, hold_out_each
from protofed.client.data.partition import Labels

LABELS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=150)
SKEWED = {0: 331, 1: 40, 2: 16, 3: 10, 4: 9, 5: 1}  # images by class


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def skewed() -> Labels:
    return rng(2).permutation(np.repeat(list(SKEWED), list(SKEWED.values())))


def test_each_class_gives_its_fraction_at_least_the_floor_and_a_rare_one_nothing() -> None:
    labels = skewed()
    train, test = hold_out(labels, None, 0.3, generator())
    assert np.bincount(labels[test], minlength=6).tolist() == [99, 12, 5, 5, 0, 0]
    assert sorted([*train, *test]) == list(range(len(labels)))
    assert (np.sort(train) == train).all()
    assert (np.sort(test) == test).all()
    again, other = hold_out(labels, None, 0.3, generator()), hold_out(labels, None, 0.3, generator(1))
    assert (np.array_equal(test, again[1]), np.array_equal(test, other[1])) == (True, False)


@pytest.mark.parametrize(
    ("size", "fraction", "tested"), [(9, 0.9, 0), (10, 0.01, 5), (10, 0.99, 5), (100, 0.06, 6), (100, 0.99, 95)]
)
def test_the_limits_of_one_class(size: int, fraction: float, tested: int) -> None:
    train, test = hold_out(np.zeros(size, np.int64), None, fraction, generator())
    assert (len(train), len(test)) == (size - tested, tested)


def test_all_of_it_is_an_evaluators_test_set() -> None:
    for groups in (None, np.zeros(352)):
        train, test = hold_out(skewed()[:352], groups, 1.0, generator())
        assert (len(train), len(test)) == (0, 352)


@given(pairs=LABELS, fraction=st.floats(0.05, 0.95), seed=st.integers(0, 5))
def test_whole_groups_floors_and_nothing_lost(pairs: list[tuple[int, int]], fraction: float, seed: int) -> None:
    labels, groups = np.array(pairs).T
    train, test = hold_out(labels, groups, fraction, generator(seed))
    assert sorted([*train, *test]) == list(range(len(labels)))
    assert not set(groups[train]) & set(groups[test])
    assert set(labels[train]) == set(labels)
    for c, tested in zip(*np.unique(labels[test], return_counts=True), strict=True):
        assert tested >= MIN_TESTED
        assert (labels[train] == c).sum() >= MIN_TESTED
        assert (labels == c).sum() >= MIN_SCORED
    again = hold_out(labels, groups, fraction, generator(seed))
    assert np.array_equal(test, again[1])


@given(labels=st.lists(st.integers(0, 3), min_size=1, max_size=120), fraction=st.floats(0.05, 0.95))
def test_groups_of_one_image_are_no_groups(labels: list[int], fraction: float) -> None:
    some = np.array(labels)
    single = hold_out(some, np.arange(len(some)), fraction, generator())
    assert np.array_equal(single[1], hold_out(some, None, fraction, generator())[1])


def test_patients_with_several_images_come_near_it() -> None:
    draw = generator(3)
    labels, groups = draw.choice(4, 2000, p=[0.7, 0.2, 0.07, 0.03]), draw.integers(0, 700, 2000)
    _, test = hold_out(labels, groups, 0.3, generator())
    shares = np.bincount(labels[test], minlength=4) / np.bincount(labels)
    assert np.abs(shares - 0.3).max() < 0.05


def test_a_class_of_one_patient_and_a_patient_with_a_rare_class_stay_in_training() -> None:
    labels = np.array([0] * 40 + [1] * 12 + [2] * 3)
    groups = np.array([*np.arange(40) // 2, *[50] * 12, 0, 1, 2])  # the rare class's patients have images of the first
    for seed in range(20):
        train, test = hold_out(labels, groups, 0.3, generator(seed))
        assert np.bincount(labels[test], minlength=3).tolist() == [12, 0, 0]
        assert {0, 1, 2, 50} <= set(groups[train])


def test_a_class_is_tested_on_with_its_floor_or_not_at_all() -> None:
    labels, groups = np.array([0] * 40 + [1] * 12), np.array([*range(40), *np.repeat([41, 42, 43], 4)])
    _, test = hold_out(labels, groups, 0.3, generator())
    assert np.bincount(labels[test], minlength=2).tolist() == [12, 0]  # four images of one patient are no measurement
    labels, groups = np.array([0] * 60 + [1] * 12), np.array([*np.arange(60) % 10, *np.arange(12) % 10])
    for seed in range(20):
        _, test = hold_out(labels, groups, 0.3, generator(seed))
        of_first, of_second = np.bincount(labels[test], minlength=2)
        assert of_second in (5, 6)
        assert 18 <= of_first <= 30


def test_each_site_holds_out_its_own_groups() -> None:
    labels, groups = balanced(2, 40), np.repeat(np.arange(40), 2)
    cut = [np.arange(40), np.arange(40, 80)]
    for given_groups in (groups, None):
        train, test = hold_out_each(labels, given_groups, cut, 0.3, rng())
        for site, kept, held in zip(cut, train, test, strict=True):
            assert sorted([*kept, *held]) == site.tolist()
            assert np.bincount(labels[held]).min() >= MIN_TESTED
            assert given_groups is None or not set(groups[kept]) & set(groups[held])
