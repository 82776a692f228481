"""A stratified sample has every class by its share, and at least one image of each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protofed.client.data.site_data import Examples
from protofed.client.data.stratified import stratified_sample, stratified_share


def labels_of(*counts: int) -> torch.Tensor:
    """So many examples of class 0, 1, …, in a fixed order that is not by class."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))]


def drawn(labels: torch.Tensor, count: int, seed: int = 0) -> list[int]:
    """How many of each class are in the sample."""
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
    some = examples.sample(4, 0)
    rows = stratified_sample(labels, 4, 0)
    assert some.images.flatten().tolist() == rows.tolist()
    assert torch.equal(some.labels, labels[rows])
    assert examples.sample(4, 0) is some
    assert examples.sample(4, 1) is not some
    assert examples.sample(9, 0) is examples


@pytest.mark.parametrize(
    ("counts", "fraction", "expected"),
    [((50, 30, 20), 0.2, [10, 6, 4]), ((9, 4, 5), 0.2, [1, 0, 1]), ((1, 1), 0.5, [0, 0]), ((0, 4), 0.5, [0, 2])],
)
def test_a_share_of_each_class_is_rounded_down(counts: tuple[int, ...], fraction: float, expected: list[int]) -> None:
    labels = labels_of(*counts)
    assert labels[stratified_share(labels, fraction)].bincount(minlength=len(counts)).tolist() == expected


def test_a_share_is_always_the_same_and_not_the_first_ones() -> None:
    labels = torch.zeros(100, dtype=torch.int64)
    taken = stratified_share(labels, 0.2)
    assert torch.equal(taken, stratified_share(labels, 0.2))
    assert not torch.equal(taken, torch.arange(100) < 20)
    assert not torch.equal(taken, torch.arange(100) >= 80)
