"""The papers' own label-skewed partitions, example by example, and the minima that every site is promised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from tests.support.partitions import balanced, held_classes, owners, rng

from protofed.client.data import partition as module
from protofed.client.data.partition import (
    Indices,
    Labels,
    creff_dirichlet,
    dirichlet,
    niid_bench_dirichlet,
    pfllib_dirichlet,
)
from protofed.common.errors import DataError

Deal: TypeAlias = Callable[[Labels, int, float, np.random.RandomState, int], list[Indices]]
GOLDEN = Path(__file__).parents[2] / "golden"


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


def test_pfllib_dirichlet_deals_as_the_released_code_in_its_order() -> None:
    golden = np.load(GOLDEN / "pfllib_partition.npz")
    cut = pfllib_dirichlet(golden["labels"], int(golden["num_clients"]), 0.1, rng(int(golden["np_seed"])))
    assert np.array_equal(owners(cut, 3000), golden["owner_dir_alpha01"])
    labels = balanced(4, 50)
    dealt = pfllib_dirichlet(labels, 3, 0.5, rng(), min_examples=10)
    assert all(np.array_equal(labels[site], np.sort(labels[site])) for site in dealt)  # class after class
    assert not any(np.array_equal(site, np.sort(site)) for site in dealt)
    ordered = niid_bench_dirichlet(labels, 3, 0.5, rng())
    assert [site.tolist() for site in ordered] == [sorted(site.tolist()) for site in dealt]


@pytest.mark.parametrize(
    ("sites", "beta", "key"), [(20, 0.4, "20_alpha04"), (20, 0.05, "20_alpha005"), (25, 0.4, "25_alpha04")]
)
def test_creff_dirichlet_deals_as_the_released_code(sites: int, beta: float, key: str) -> None:
    """A long tail of ten classes; 25 sites are two parts of ten and one of five."""
    golden = np.load(GOLDEN / "fedprp_creff_dirichlet_partition.npz")
    cut = creff_dirichlet(golden["labels"], sites, beta, rng(int(golden["seed"])))
    assert np.array_equal(owners(cut, len(golden["labels"])), golden[f"owner_{key}"])


@pytest.mark.parametrize("sites", [1, 3, 10, 12, 37])
def test_creff_dirichlet_gives_all_sites_one_size(sites: int) -> None:
    cut = creff_dirichlet(balanced(4, 101), sites, 0.3, rng(2))
    owners(cut, 404)
    assert {len(site) for site in cut} <= {404 // sites, 404 // sites + 1}
    assert all(np.array_equal(site, np.sort(site)) for site in cut)


def test_creff_dirichlet_refuses_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"12 examples cannot give 13 sites one each; lower partition\.sites"):
        creff_dirichlet(balanced(4, 3), 13, 0.3, rng())
    monkeypatch.setattr(module, "ATTEMPTS", 1)
    with pytest.raises(DataError, match=r"100 examples into 10 sites with beta 0\.0001, at least 5 .* 10 draws; raise"):
        creff_dirichlet(balanced(4, 50), 20, 1e-4, rng())


@pytest.mark.parametrize("deal", [pfllib_dirichlet, niid_bench_dirichlet])
def test_draws_go_on_until_every_site_has_its_minimum(deal: Deal) -> None:
    labels = balanced(10, 100)
    smallest = [min(map(len, deal(labels, 10, 0.1, rng(seed), least))) for seed in range(5) for least in (1, 30)]
    assert min(smallest[::2]) < 30 <= min(smallest[1::2])


@pytest.mark.parametrize("deal", [pfllib_dirichlet, niid_bench_dirichlet])
def test_a_minimum_of_examples_alone_names_no_classes(deal: Deal, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        DataError, match="100 examples of 4 classes cannot give 9 sites at least 12 examples each; lower"
    ):
        deal(balanced(4, 25), 9, 0.3, rng(), 12)
    monkeypatch.setattr(module, "ATTEMPTS", 5)
    with pytest.raises(DataError, match=r"beta 0\.0001, at least 10 examples each, in 5 draws"):
        deal(balanced(4, 25), 10, 1e-4, rng(), 10)


def test_dirichlet_is_more_skewed_for_a_smaller_beta_and_depends_on_the_seed_alone() -> None:
    labels = balanced(10, 500)

    def largest_share(beta: float) -> float:
        cut = dirichlet(labels, 10, beta, rng(3))
        return float(np.mean([np.bincount(labels[site]).max() / len(site) for site in cut]))

    assert largest_share(0.1) > largest_share(1.0) + 0.1 > largest_share(100.0) + 0.2
    first, again, other = (owners(dirichlet(labels, 4, 0.5, rng(s)), 5000) for s in (7, 7, 8))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_sites_short_of_classes_swap_with_the_last_sites() -> None:
    chunks = [np.array([site]) for site in range(5)]
    piece = np.array([9])
    held = [[piece], [piece, piece], [], [piece, piece], [piece, piece]]
    module._swap(chunks, held, 2)  # sites 0 and 2 are short: 0 <-> 4, then 2 <-> 3
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
    monkeypatch.setattr(module, "ATTEMPTS", 5)
    with pytest.raises(DataError, match=r"partition\.beta"):
        dirichlet(balanced(4, 25), 10, beta, rng(), min_examples=10, min_classes=4)
