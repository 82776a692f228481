"""Every example goes to exactly one site, in the papers' own proportions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from protofed.client.data import partition
from protofed.client.data.partition import Indices, Labels, by_column, dirichlet, long_tail, long_tail_sizes, shards
from protofed.common.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden"


def rng(seed: int = 0) -> np.random.RandomState:
    return np.random.RandomState(seed)


def balanced(classes: int, each: int) -> Labels:
    return rng(1).permutation(np.repeat(np.arange(classes), each))


def owners(cut: list[Indices], count: int) -> Labels:
    """[N] the site of every example; fails unless each has exactly one."""
    assert np.array_equal(np.sort(np.concatenate(cut)), np.arange(count))
    owner = np.full(count, -1, dtype=np.int64)
    for site, indices in enumerate(cut):
        owner[indices] = site
    return owner


def held_classes(labels: Labels, cut: list[Indices]) -> list[set[int]]:
    return [set(labels[site].tolist()) for site in cut]


@pytest.mark.parametrize(("beta", "key"), [(0.3, "owner_beta03"), (1.0, "owner_beta10")])
def test_dirichlet_deals_as_the_released_code(beta: float, key: str) -> None:
    golden = np.load(GOLDEN / "fednh_dirichlet_partition.npz")
    cut = dirichlet(golden["labels"], int(golden["num_clients"]), beta, rng(int(golden["seed"])))
    assert np.array_equal(owners(cut, 2000), golden[key])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("beta", [0.1, 0.3, 10.0])
def test_dirichlet_gives_every_site_its_minimum(beta: float, seed: int) -> None:
    labels = balanced(10, 300)
    cut = dirichlet(labels, 20, beta, rng(seed), min_examples=15, min_classes=3)
    owners(cut, 3000)
    assert min(len(site) for site in cut) >= 15
    assert min(len(classes) for classes in held_classes(labels, cut)) >= 3


def test_dirichlet_is_more_skewed_for_a_smaller_beta() -> None:
    labels = balanced(10, 500)

    def largest_share(beta: float) -> float:
        cut = dirichlet(labels, 10, beta, rng(3))
        return float(np.mean([np.bincount(labels[site]).max() / len(site) for site in cut]))

    assert largest_share(0.1) > largest_share(1.0) + 0.1 > largest_share(100.0) + 0.2


def test_dirichlet_depends_on_the_seed_alone() -> None:
    labels = balanced(4, 100)
    first, again, other = (owners(dirichlet(labels, 4, 0.5, rng(s)), 400) for s in (7, 7, 8))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_sites_short_of_classes_swap_with_the_last_sites() -> None:
    chunks = [np.array([site]) for site in range(5)]
    piece = np.array([9])
    held = [[piece], [piece, piece], [], [piece, piece], [piece, piece]]
    partition._swap(chunks, held, 2)  # sites 0 and 2 are short: 0 <-> 4, then 2 <-> 3
    assert [int(chunk[0]) for chunk in chunks] == [4, 1, 3, 2, 0]


@pytest.mark.parametrize(
    ("sites", "minima", "said"),
    [
        (9, {"min_examples": 12}, "100 examples of 4 classes cannot give 9 sites at least 12"),
        (2, {"min_classes": 5}, "and 5 classes each"),
    ],
)
def test_dirichlet_refuses_what_cannot_be(sites: int, minima: dict[str, int], said: str) -> None:
    with pytest.raises(DataError, match=said):
        dirichlet(balanced(4, 25), sites, 0.3, rng(), **minima)


@pytest.mark.parametrize("beta", [0.05, 1e-4])
def test_dirichlet_gives_up_in_words_rather_than_accept(beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "ATTEMPTS", 5)
    with pytest.raises(DataError, match=r"in 5 draws; raise partition\.beta"):
        dirichlet(balanced(4, 25), 10, beta, rng(), min_examples=10, min_classes=4)


def test_shards_deals_each_site_as_many_equal_shards() -> None:
    labels = balanced(4, 6)  # 4 sites * 2 shards / 4 classes: 2 shards of 3 examples a class
    cut = shards(labels, 4, 2, rng())
    owners(cut, 24)
    assert [len(site) for site in cut] == [6, 6, 6, 6]
    assert all(set(np.bincount(labels[site], minlength=4).tolist()) <= {0, 3, 6} for site in cut)


def test_shards_keeps_the_classes_sizes() -> None:
    labels = np.array([0] * 10 + [1] * 4)
    cut = shards(labels, 2, 1, rng())
    assert sorted(len(site) for site in cut) == [4, 10]
    assert sorted(held_classes(labels, cut), key=min) == [{0}, {1}]


@pytest.mark.parametrize(
    ("labels", "sites", "each", "said"),
    [
        (balanced(4, 6), 3, 3, "9 shards, no multiple of 4 classes"),
        (balanced(4, 6), 1, 2, "2 shards, no multiple of 4 classes"),
        (np.array([0, 0, 0, 1]), 2, 2, "fewer than 2 examples"),
        (np.empty(0, dtype=np.int64), 2, 2, "no multiple of 0 classes"),
    ],
)
def test_shards_refuses_what_does_not_come_out_even(labels: Labels, sites: int, each: int, said: str) -> None:
    with pytest.raises(DataError, match=said):
        shards(labels, sites, each, rng())


def test_by_column_gives_one_site_a_value_in_sorted_order() -> None:
    cut = by_column(np.array(["vienna", "basel", "vienna", "oslo"]))
    assert [site.tolist() for site in cut] == [[1], [3], [0, 2]]


def test_long_tail_has_the_papers_sizes() -> None:
    golden = np.load(GOLDEN / "longtail_counts.npz")
    names = [name for name in golden if name.endswith("_counts")]
    assert len(names) == 15
    for name in names:
        classes, factor = name.removesuffix("_counts").removeprefix("K").split("_if")
        assert long_tail_sizes(int(golden[name][0]), int(classes), float(factor)) == golden[name].tolist(), name


def test_long_tail_keeps_the_first_class_and_never_more_than_there_is() -> None:
    labels = np.array([0] * 100 + [1] * 100 + [2] * 4)  # wanted: 100, int(100 * 0.25 ** 0.5) = 50, 25
    kept = long_tail(labels, 0.25, rng())
    assert np.bincount(labels[kept]).tolist() == [100, 50, 4]
    assert np.array_equal(kept, np.unique(kept))
    assert not np.array_equal(kept, long_tail(labels, 0.25, rng(1)))


def test_long_tail_of_factor_one_keeps_everything() -> None:
    assert len(long_tail(balanced(1, 7), 1.0, rng())) == 7
    assert len(long_tail(balanced(3, 7), 1.0, rng())) == 21
