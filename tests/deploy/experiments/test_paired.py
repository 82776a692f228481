"""Paired differences, their interval and their test, by hand and against all signs counted one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from protofed.deploy.experiments.table import (
    PairedDifference,
    can_show,
    corrected,
    paired,
    seeds_needed,
    smallest_p,
)


def difference(*values: float) -> PairedDifference:
    found = paired(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    assert found is not None
    return found


def test_pairs_are_the_seeds_that_both_have() -> None:
    found = paired({0: 0.5, 1: 0.6, 7: 0.9}, {7: 0.4, 0: 0.4, 3: 0.1})
    assert found is not None
    assert found.seeds == (0, 7)
    assert found.mean == pytest.approx((0.1 + 0.5) / 2)
    assert paired({0: 0.5}, {1: 0.5}) is None


def test_the_interval_is_students_t() -> None:
    found = difference(0.1, 0.2, 0.3)
    half = 4.302653 * 0.1 / 3**0.5  # t of 97.5 % with 2 degrees of freedom; s = 0.1
    assert found.low == pytest.approx(0.2 - half, abs=1e-6)
    assert found.high == pytest.approx(0.2 + half, abs=1e-6)


def test_one_seed_has_neither_interval_nor_test() -> None:
    assert difference(0.3) == PairedDifference((0,), 0.3)
    assert not difference(0.3).significant


@pytest.mark.parametrize(
    ("values", "p"),
    [
        ((0.1, 0.2, 0.3), 2 / 8),
        ((-0.1, -0.2, -0.3), 2 / 8),
        ((0.1, 0.2, -0.3), 1.0),
        ((0.0, 0.0, 0.0), 1.0),
        ((0.1, 0.0, 0.1), 0.5),
        ((0.1,) * 6, 2 / 64),
    ],
)
def test_p_of_few_seeds(values: tuple[float, ...], p: float) -> None:
    assert difference(*values).p == pytest.approx(p)


@pytest.mark.parametrize(
    ("counts", "p"), [((-3, -1, 4, -1), 1.0), ((-3, 4, -4, 3, 3, 4), 38 / 64), ((5, 1, 3, -1, -2, 1, -3), 90 / 128)]
)
@pytest.mark.parametrize("right", [0, 128, 266])  # of 520 images, by the reference
def test_signs_of_equal_means_tie_whatever_their_last_bits(counts: tuple[int, ...], p: float, right: int) -> None:
    """Counted by hand in whole images, whose sums are exact."""
    found = paired({seed: (right + n) / 520 for seed, n in enumerate(counts)}, dict.fromkeys(range(9), right / 520))
    assert found is not None
    assert found.p == p


def test_p_is_the_share_of_all_signs_that_give_as_much() -> None:
    drawn = np.random.default_rng(5)
    for _ in range(5):
        values = drawn.normal(0.6, 1, 7)
        means = [abs(np.mean(np.array(signs) * values)) for signs in product((1, -1), repeat=7)]
        expected = np.mean([mean >= abs(values.mean()) - 1e-12 for mean in means])
        assert difference(*values).p == pytest.approx(expected)


def test_of_many_seeds_signs_are_drawn_alike_every_time() -> None:
    values = np.random.default_rng(5).normal(0.3, 1, 20)
    assert difference(*values).p == difference(*values).p
    assert 0 < (difference(*values + 5).p or 0) < 1e-3


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_no_difference_of_few_seeds_is_ever_significant(seeds: int) -> None:
    found = corrected({"huge": difference(*(1.0 + 0.001 * seed for seed in range(seeds)))})["huge"]
    assert found.p == smallest_p(seeds) == 2 / 2**seeds
    assert not found.significant
    assert "no difference can be significant" in can_show({seeds}, 1)


def test_six_seeds_are_enough_for_one_row_and_not_for_two() -> None:
    agreed = difference(*(0.1 + 0.01 * seed for seed in range(6)))
    assert corrected({"a": agreed})["a"].significant
    assert not any(of.significant for of in corrected({"a": agreed, "b": agreed}).values())
    assert (seeds_needed(1), seeds_needed(2), seeds_needed(20)) == (6, 7, 10)
    assert "no difference" not in can_show([6], 1)
    assert "no difference" in can_show([6], 2)


def test_holms_correction() -> None:
    raw = {"a": 0.04, "b": 0.01, "c": 0.03, "d": 0.9}
    found = corrected({name: PairedDifference((0, 1), 0.0, 0.0, 0.0, p) for name, p in raw.items()})
    # b: 4 × 0.01; c: 3 × 0.03; a: 2 × 0.04 = 0.08, and c's 0.09 is no smaller; d: 0.9
    assert {name: of.corrected for name, of in found.items()} == pytest.approx(
        {"a": 0.09, "b": 0.04, "c": 0.09, "d": 0.9}
    )
    alone = corrected({"a": difference(0.3), "b": difference(0.1, 0.2)})
    assert (alone["a"].corrected, alone["b"].corrected) == (None, 0.5)  # one row is tested
