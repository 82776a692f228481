"""Who is invited is a pure function of (seed, round, available)."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.common.config.recipe import Federation
from protofed.server.rounds.sampling import Uniform, cohort_size, min_cohort

SITES = tuple("abcdef")
quick = settings(max_examples=100, deadline=None, derandomize=True)


@quick
@given(st.integers(0, 2**32), st.integers(0, 1000), st.sets(st.sampled_from(SITES)), st.integers(1, 8))
def test_the_same_question_has_the_same_answer_of_the_right_size(
    seed: int, round: int, available: set[str], size: int
) -> None:
    cohort = Uniform(seed)(round, sorted(available), size)
    assert cohort <= available
    assert len(cohort) == min(size, len(available))
    assert cohort == Uniform(seed)(round, sorted(available, reverse=True), size)


def test_a_cohort_is_the_same_on_every_machine_and_for_ever() -> None:
    """A restarted server, perhaps of a newer version, invites the same sites."""
    assert [sorted(Uniform(7)(number, SITES, 3)) for number in range(1, 5)] == [
        list("cef"),
        list("cdf"),
        list("acd"),
        list("cdf"),
    ]


@quick
@given(st.integers(0, 1000), st.integers(1, 100), st.sampled_from(SITES))
def test_a_site_that_leaves_gives_up_one_place_and_moves_nobody_else(seed: int, round: int, gone: str) -> None:
    sampler, rest = Uniform(seed), [site for site in SITES if site != gone]
    before, after = sampler(round, SITES, 3), sampler(round, rest, 3)
    assert before - {gone} <= after
    assert len(after - before) == (gone in before)


def test_every_cohort_is_about_as_likely_as_any_other() -> None:
    rounds, sampler = 6000, Uniform(3)
    seen = Counter(sampler(number, SITES, 2) for number in range(rounds))
    pairs = [frozenset(pair) for pair in combinations(SITES, 2)]
    assert set(seen) == set(pairs)
    expected = rounds / len(pairs)
    chi2 = sum((seen[pair] - expected) ** 2 / expected for pair in pairs)
    assert chi2 < 36.1  # 14 degrees of freedom: one in a thousand draws exceeds it; this draw is fixed


@pytest.mark.parametrize(("left", "right"), [(Uniform(0), Uniform(1)), (Uniform(1), Uniform(11))])
def test_seeds_differ(left: Uniform, right: Uniform) -> None:
    assert any(left(number, SITES, 3) != right(number, SITES, 3) for number in range(20))


def test_seed_and_round_cannot_be_taken_for_each_other() -> None:
    draws = {(seed, number): Uniform(seed)(number, SITES, 3) for seed in (1, 11, 111) for number in (1, 11, 111)}
    assert len(set(draws.values())) > 4


@pytest.mark.parametrize(
    ("rate", "sites", "size"),
    [(0.07, 100, 7), (1.0, 5, 5), (0.5, 5, 3), (0.1, 5, 1), (0.01, 3, 1), (0.29, 100, 29), (1.0, 0, 1), (0.1, 20, 2)],
)
def test_a_cohort_is_the_share_of_the_sites_rounded_up_and_never_empty(rate: float, sites: int, size: int) -> None:
    assert cohort_size(Federation(participation=rate), [str(n) for n in range(sites)]) == size


@quick
@given(st.integers(1, 100), st.integers(1, 500))
def test_percents_are_taken_exactly(percent: int, sites: int) -> None:
    federation = Federation(participation=percent / 100)
    assert cohort_size(federation, [str(n) for n in range(sites)]) == -(-percent * sites // 100)


@pytest.mark.parametrize(
    ("federation", "least"),
    [
        ({}, 1),  # half of two sites
        ({"min_sites": 3}, 2),
        ({"min_sites": 10, "quorum": 1.0}, 10),
        ({"min_sites": 100, "participation": 0.1, "quorum": 1.0}, 10),
        ({"min_sites": 10, "participation": 0.07, "quorum": 0.5}, 1),
        ({"min_sites": 1, "quorum": 3}, 3),  # no round opens with fewer
        ({"min_sites": 5, "quorum": 0.2, "required_sites": ["a", "b", "c"]}, 3),
        ({"min_sites": 2, "quorum": 1, "required_sites": ["a", "a"]}, 1),
        ({"min_sites": 4, "over_selection": 3.0, "quorum": 0.5}, 2),
        ({"min_sites": 4, "quorum": 0.5, "secure": True}, 3),  # of a sum of two, each knows the other's
    ],
)
def test_what_sites_are_told_of_the_cohort_is_what_every_round_has(federation: dict[str, Any], least: int) -> None:
    assert min_cohort(Federation.model_validate(federation)) == least
