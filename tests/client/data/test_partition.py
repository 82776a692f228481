"""Every example goes to exactly one site, in the papers' own proportions.

A stratified sample has every class by its share, and at least one image of each.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.model_selection import train_test_split
from tests.support.partitions import balanced, held_classes, owners, rng

from protofed.client.data.examples import Examples, stratified_sample, stratified_share
from protofed.client.data.partition import (
    Labels,
    by_class,
    by_column,
    hold_out,
    long_tail,
    long_tail_sizes,
    pathological,
    pfllib_dirichlet,
    shards,
)
from protofed.client.tasks.classification import CLASSES
from protofed.common.errors import DataError

GOLDEN = Path(__file__).parents[2] / "golden"


def test_shards_deals_each_site_as_many_equal_shards() -> None:
    labels = balanced(4, 6)  # 4 sites * 2 shards / 4 classes: 2 shards of 3 examples a class
    cut = shards(labels, 4, 2, rng())
    owners(cut, 24)
    assert [len(site) for site in cut] == [6, 6, 6, 6]
    assert all(set(np.bincount(labels[site], minlength=4).tolist()) <= {0, 3, 6} for site in cut)
    labels = np.array([0] * 10 + [1] * 4)
    cut = shards(labels, 2, 1, rng())
    assert sorted(len(site) for site in cut) == [4, 10]
    assert sorted(held_classes(labels, cut), key=min) == [{0}, {1}]


@pytest.mark.parametrize(
    ("labels", "sites", "each", "said"),
    [
        (balanced(4, 6), 3, 3, "9 shards, no multiple of 4 classes"),
        (np.array([0, 0, 0, 1]), 2, 2, "fewer than 2 examples"),
        (np.empty(0, dtype=np.int64), 2, 2, "no multiple of 0 classes"),
    ],
)
def test_shards_refuses_what_does_not_come_out_even(labels: Labels, sites: int, each: int, said: str) -> None:
    with pytest.raises(DataError, match=said):
        shards(labels, sites, each, rng())


def test_by_column_and_by_class_give_each_example_to_its_site() -> None:
    cut = by_column(np.array(["vienna", "basel", "vienna", "oslo"]))
    assert [site.tolist() for site in cut] == [[1], [3], [0, 2]]
    labels = np.array([0, 0, 0, 1, 1, 2])
    cut = [np.array([0, 3]), np.array([1, 4]), np.array([2]), np.array([5])]  # {0, 1}, {0, 1}, {0}, {2}
    test_labels = np.array([0] * 7 + [1] * 4 + [2] * 3 + [3] * 2)  # nobody holds class 3
    parts = by_class(labels, cut, test_labels, rng())
    counts = [np.bincount(test_labels[part], minlength=4).tolist() for part in parts]
    assert counts == [[3, 2, 0, 0], [2, 2, 0, 0], [2, 0, 0, 0], [0, 0, 3, 0]]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(14))
    assert not np.array_equal(parts[0], by_class(labels, cut, test_labels, rng(1))[0])


@pytest.mark.parametrize(("balanced", "key"), [(False, "owner_pat_2class"), (True, "owner_pat_2class_balanced")])
def test_pathological_deals_as_the_released_code(balanced: bool, key: str) -> None:
    golden = np.load(GOLDEN / "pfllib_partition.npz")
    cut = pathological(golden["labels"], int(golden["num_clients"]), 2, balanced, rng(int(golden["np_seed"])))
    assert np.array_equal(owners(cut, 3000), golden[key])


@pytest.mark.parametrize("balanced_shares", [True, False])
@pytest.mark.parametrize(
    ("sites", "each", "groups"),
    [(6, 2, [{0, 1}] * 3 + [{2, 3}] * 3), (4, 1, [{0}, {1}, {2}, {3}]), (3, 4, [{0, 1, 2, 3}] * 3)],
)
def test_pathological_gives_whole_groups(sites: int, each: int, groups: list[set[int]], balanced_shares: bool) -> None:
    labels = balanced(4, 7)
    cut = pathological(labels, sites, each, balanced_shares, rng())
    owners(cut, 28)
    assert held_classes(labels, cut) == groups


def test_pathological_shares_are_equal_or_drawn() -> None:
    labels = np.zeros(1000, dtype=np.int64)
    assert [len(site) for site in pathological(labels, 3, 1, True, rng())] == [333, 333, 334]
    drawn = [len(pathological(labels, 3, 1, False, rng(seed))[0]) for seed in range(300)]
    assert 33 <= min(drawn) < 50  # a tenth of the mean share is 33.3
    assert 310 < max(drawn) < 333


@pytest.mark.parametrize("balanced_shares", [True, False])
def test_pathological_leaves_no_site_without_a_class_of_few_examples(balanced_shares: bool) -> None:
    cut = pathological(np.array([0, 0, 0, 1, 1, 1]), 4, 1, balanced_shares, rng())
    assert sorted(len(site) for site in cut) == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("labels", "sites", "each", "said"),
    [
        (balanced(4, 6), 3, 2, "3 sites of 2 classes each do not divide 4 classes evenly"),
        (balanced(4, 6), 1, 2, r"expected classes a multiple of partition\.classes_each"),
        (np.empty(0, dtype=np.int64), 2, 2, "0 classes"),
        (np.array([0, 0, 0, 1]), 4, 1, r"1 examples are too few for its 2 sites; lower partition\.sites"),
    ],
)
def test_pathological_refuses_what_does_not_come_out_even(labels: Labels, sites: int, each: int, said: str) -> None:
    with pytest.raises(DataError, match=said):
        pathological(labels, sites, each, False, rng())


@pytest.mark.parametrize("share", [0.25, 0.3, 0.5])
def test_hold_out_is_scikit_learns(share: float) -> None:
    cut = pfllib_dirichlet(balanced(4, 50), 5, 0.5, rng(1), min_examples=4)
    ours, theirs = rng(7), rng(7)
    train, test = hold_out(cut, share, ours)
    for site, kept, held in zip(cut, train, test, strict=True):
        expected = train_test_split(site, test_size=share, random_state=theirs)
        assert [kept.tolist(), held.tolist()] == [sorted(part.tolist()) for part in expected]
    owners([*train, *test], 200)
    for size in (0, 1):
        with pytest.raises(DataError, match=f"a site's {size} examples leaves none to train on"):
            hold_out([np.arange(9), np.arange(size)], 0.25, rng())


def test_long_tail_has_the_papers_sizes_and_never_more_than_there_is() -> None:
    golden = np.load(GOLDEN / "longtail_counts.npz")
    names = [name for name in golden if name.endswith("_counts")]
    assert len(names) == 15
    for name in names:
        classes, factor = name.removesuffix("_counts").removeprefix("K").split("_if")
        assert long_tail_sizes(int(golden[name][0]), int(classes), float(factor)) == golden[name].tolist(), name
    labels = np.array([0] * 100 + [1] * 100 + [2] * 4)  # wanted: 100, int(100 * 0.25 ** 0.5) = 50, 25
    kept = long_tail(labels, 0.25, rng())
    assert np.bincount(labels[kept]).tolist() == [100, 50, 4]
    assert np.array_equal(kept, np.unique(kept))
    assert not np.array_equal(kept, long_tail(labels, 0.25, rng(1)))
    assert len(long_tail(balanced(1, 7), 1.0, rng())) == 7
    assert len(long_tail(balanced(3, 7), 1.0, rng())) == 21


def labels_of(*counts: int) -> torch.Tensor:
    """So many examples of class 0, 1, …, in a fixed order that is not by class."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))]


def drawn(labels: torch.Tensor, count: int, seed: int = 0) -> list[int]:
    return labels[stratified_sample(labels, count, seed)].bincount(minlength=int(labels.max()) + 1).tolist()


@pytest.mark.parametrize(
    ("counts", "count", "expected"),
    [
        ((1000, 1000, 1000), 30, [10, 10, 10]),
        ((50, 30, 20), 10, [5, 3, 2]),
        ((50, 30, 20), 11, [6, 3, 2]),  # shares 5.5, 3.3, 2.2: the largest remainder is rounded up
        ((997, 2, 1), 10, [8, 1, 1]),  # rare classes keep one each, for which the most frequent one pays
        ((0, 90, 10), 10, [0, 9, 1]),  # a class that the test set lacks has none
        ((3, 2), 5, [3, 2]),
        ((3, 2), 500, [3, 2]),
        ((5, 5, 5), 2, [1, 1, 1]),  # never less than one of each
    ],
)
def test_a_class_has_its_share(counts: tuple[int, ...], count: int, expected: list[int]) -> None:
    assert drawn(labels_of(*counts), count) == expected


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any), st.integers(1, 300), st.integers(0, 9))
def test_a_sample_is_of_its_size_and_of_all_classes(counts: list[int], count: int, seed: int) -> None:
    labels = labels_of(*counts)
    rows = stratified_sample(labels, count, seed)
    present = sum(number > 0 for number in counts)
    assert len(rows) == min(max(count, present), len(labels))
    assert rows.tolist() == sorted(set(rows.tolist()))
    taken = labels[rows].bincount(minlength=len(counts)).tolist()
    assert all(0 < n <= total if total else n == 0 for n, total in zip(taken, counts, strict=True))


def test_a_seed_always_draws_the_same_images_and_another_seed_others() -> None:
    labels = labels_of(500, 300, 200)
    first, again, other = (stratified_sample(labels, 100, seed).tolist() for seed in (3, 3, 4))
    assert first == again != other
    assert stratified_sample(labels, 100, -(2**63)).shape == (100,)


def test_examples_are_drawn_once_and_all_of_them_are_no_copy() -> None:
    labels = labels_of(6, 3)
    examples = Examples(torch.arange(9, dtype=torch.uint8).reshape(9, 1, 1, 1), labels)
    some = examples.sample(4, 0, CLASSES.strata)
    rows = stratified_sample(labels, 4, 0)
    assert some.pixels().flatten().tolist() == rows.tolist()
    assert torch.equal(some.labels, labels[rows])
    assert examples.sample(4, 0, CLASSES.strata) is some
    assert examples.sample(4, 1, CLASSES.strata) is not some
    assert examples.sample(9, 0, CLASSES.strata) is examples


@pytest.mark.parametrize(
    ("counts", "fraction", "expected"),
    [((50, 30, 20), 0.2, [10, 6, 4]), ((9, 4, 5), 0.2, [1, 0, 1]), ((1, 1), 0.5, [0, 0]), ((0, 4), 0.5, [0, 2])],
)
def test_a_share_of_each_class_is_rounded_down(counts: tuple[int, ...], fraction: float, expected: list[int]) -> None:
    labels = labels_of(*counts)
    taken = stratified_share(labels, fraction)
    assert labels[taken].bincount(minlength=len(counts)).tolist() == expected
    assert torch.equal(taken, stratified_share(labels, fraction))
