"""Who is invited is a pure function of (seed, round, available)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import combinations
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.conftest import recipe

from protofed.client.models.catalogue import architectures
from protofed.common import plugins
from protofed.common.config.recipe import MODELS, Federation
from protofed.common.errors import ConfigError
from protofed.common.protocol.messages import MAX_SECURE_SITES, TaskKind
from protofed.common.secure_aggregation.groups import Groups, in_order, members
from protofed.server.rounds.machine.advance import advance
from protofed.server.rounds.machine.phases import (
    NOBODY,
    Aggregate,
    Aggregated,
    Arrived,
    AskStep,
    Collecting,
    Declined,
    Effect,
    Event,
    FinishedPhase,
    Idle,
    Phase,
    Sites,
    Summing,
    Tick,
)
from protofed.server.rounds.machine.rules import (
    Grouping,
    RoundRules,
    Uniform,
    check_model,
    cohort_size,
    left_out,
    min_cohort,
    unmet,
)

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


def test_seeds_differ_and_seed_and_round_cannot_be_taken_for_each_other() -> None:
    for left, right in ((Uniform(0), Uniform(1)), (Uniform(1), Uniform(11))):
        assert any(left(number, SITES, 3) != right(number, SITES, 3) for number in range(20))
    draws = {(seed, number): Uniform(seed)(number, SITES, 3) for seed in (1, 11, 111) for number in (1, 11, 111)}
    assert len(set(draws.values())) > 4
    groups = OF_THREE.formed(TEN)
    assert OF_THREE.formed(sorted(TEN, reverse=True)) == groups
    assert Grouping("run", 1, 3).formed(TEN) != groups != Grouping("another", 0, 3).formed(TEN)


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


TEN = frozenset("abcdefghij")
OF_THREE = Grouping("run", 0, 3)


@pytest.mark.parametrize(
    ("sites", "sizes"), [(0, []), (2, []), (3, [3]), (5, [5]), (6, [3, 3]), (8, [4, 4]), (10, [3, 3, 4])]
)
def test_groups_are_as_even_as_possible_and_none_is_too_small(sites: int, sizes: list[int]) -> None:
    groups = OF_THREE.formed(frozenset(sorted(TEN)[:sites]))
    assert sorted(map(len, groups)) == sizes
    assert groups == in_order(groups)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.frozensets(st.sampled_from(sorted(TEN))), max_size=8), st.sampled_from([1, 3, 4]))
def test_a_group_stays_as_it_was_formed_whoever_comes(comers: list[Sites], fewest: int) -> None:
    grouping, known = Grouping("run", 0, fewest), Groups()
    for sites in comers:
        of_sum = grouping.of(known, sites)
        assert all(set(group) <= sites and fewest <= len(group) < max(2 * fewest, 2) for group in of_sum)
        later = in_order({*known, *of_sum})
        assert set(known) <= set(later)
        assert len(members(later)) == sum(map(len, later)), "no site is in two groups"
        assert left_out(later, sites, fewest).keys() == sites - members(of_sum)
        known = later


def test_groups_of_fewer_sites_than_a_run_asks_for_are_not_aggregated_and_who_is_left_out_is_told_why() -> None:
    known, four = (("a", "b", "c"),), Grouping("run", 0, 4)
    assert four.of(known, TEN) == four.formed(TEN - set("abc"))
    assert members(four.of(known, frozenset("abcdef"))) == frozenset()
    assert left_out(known, set("ab"), 4) == dict.fromkeys(
        "ab", "its group is of 3 sites, and the run's are of 4 or more"
    )
    assert left_out((("a", "b", "c"),), set("abx"), 3) == {
        "a": "waits for c: its group is aggregated as a whole, or not at all",
        "b": "waits for c: its group is aggregated as a whole, or not at all",
        "x": "waits for 2 more new sites: its sums are over groups of 3",
    }
    assert left_out((), set("xy"), 3)["x"] == "waits for 1 more new site: its sums are over groups of 3"


def test_a_run_of_any_sites_sums_groups_whole_and_the_others_alone() -> None:
    known, any_ = (("a", "b", "c"),), Grouping("run", 0, 1)
    assert any_.of(known, frozenset("abde")) == (("d",), ("e",))
    assert any_.of(known, frozenset("abcd")) == any_.started(known, "abcd") == (("a", "b", "c"), ("d",))
    assert left_out(known, set("abd"), 1).keys() == set("ab")


@pytest.mark.parametrize("size", [1, 3, 4, 5, 7, 10])
def test_a_cohort_is_of_whole_groups_and_no_larger_than_it_must_be(size: int) -> None:
    known = OF_THREE.formed(frozenset("abcdefg"))
    drawn = [OF_THREE.drawn(known, TEN, frozenset("a"), size, Uniform(0), number) for number in range(1, 30)]
    for cohort in drawn:
        assert size <= len(cohort) <= size + 3
        assert all(cohort.issuperset(group) or not cohort.intersection(group) for group in known)
        assert cohort & set("hij") in (frozenset(), frozenset("hij"))
        assert "a" in cohort
    if size in (5, 7):
        assert len(set(drawn)) > 1


def test_no_more_sites_are_drawn_than_a_sum_takes() -> None:
    many = frozenset(f"{number:02}" for number in range(70))
    cohort = OF_THREE.drawn((), many, NOBODY, MAX_SECURE_SITES, Uniform(0), 1)
    assert MAX_SECURE_SITES - 2 * 3 < len(cohort) <= MAX_SECURE_SITES


def rules(fewest: int, participation: float, *, contributors: bool, seed: int = 0) -> RoundRules:
    table = {"secure": True, "min_sites": 3, "sum_group": fewest, "participation": participation, "quorum": 3}
    federation = Federation.model_validate({**table, "max_attempts": 1000, "score_every": 0, "heartbeat_s": 0.001})
    grouping = Grouping("run", seed, fewest)
    return RoundRules(1000, federation, Uniform(seed), secure=True, contributors=contributors, grouping=grouping)


@dataclass
class Walk:
    """A run of sites that come, drop out and return at random, and whose vectors its server can open."""

    rules: RoundRules
    random: Random
    phase: Phase = field(default_factory=lambda: Idle(1))
    now: float = 0.0
    attempt: int = 0
    groups: Groups = ()
    sums: list[Sites] = field(default_factory=list)

    def go(self, events: int) -> None:
        for _ in range(events):
            assert not isinstance(self.phase, FinishedPhase)
            self.step(self._event())

    def step(self, event: Event) -> None:
        self.phase, effects = advance(self.rules, self.phase, event)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case AskStep(phase) if phase.step is TaskKind.SHARE:
                self.groups = in_order({*self.groups, *phase.groups})
            case AskStep(phase) if phase.step is TaskKind.AGREE_CONTRIBUTORS:
                self.sums.append(phase.cohort)  # whose flags may be opened, though their numbers should not come
            case AskStep(phase) if phase.step is TaskKind.AGREE:
                self.sums.append(phase.survivors)
            case Aggregate():
                self.step(Aggregated(self.now, NOBODY))

    def _event(self) -> Event:
        draw = self.random.random()
        if isinstance(self.phase, Collecting | Summing) and self.phase.awaited and draw < 0.95:
            site = self.random.choice(sorted(self.phase.awaited))
            return Declined(site, self.now) if draw < 0.02 else Arrived(site, self.now)
        self.now += self.random.choice([1.0, 700.0])
        enrolled = frozenset(sorted(TEN)[: 5 + int(self.now / 20_000)])  # some come late
        alive = frozenset(site for site in enrolled if self.random.random() < 0.9)
        self.attempt += 1
        return Tick(self.now, enrolled, alive, NOBODY, self.attempt, groups=self.groups)

    def atoms(self) -> list[int]:
        """Sizes of the sets of sites that are in the same sums, of those that are in any.

        What is computed of the sums linearly has equal parts of all sites of an atom, so it is of no fewer sites.
        """
        columns = Counter(tuple(site in secure for secure in self.sums) for site in TEN)
        return [size for column, size in columns.items() if any(column)]


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("contributors", [True, False])
def test_nothing_computed_of_all_sums_of_a_run_is_about_fewer_sites_than_a_group(
    participation: float, contributors: bool
) -> None:
    distinct = 0
    for seed in range(60):
        walk = Walk(rules(3, participation, contributors=contributors, seed=seed), Random(seed))  # noqa: S311
        walk.go(1500)
        assert min(walk.atoms()) >= 3
        assert all(3 <= len(group) < 6 for group in walk.groups)
        distinct += len(set(walk.sums)) > 1
    assert distinct > 30, "the sums of most runs differ"


@dataclass
class TwoRuns(Walk):
    """A second run of the same server, which another recipe has other sites in."""

    comers: Sites = TEN

    def second(self, rules: RoundRules, comers: Sites, groups: Groups) -> TwoRuns:
        return TwoRuns(rules, self.random, groups=groups, sums=self.sums, comers=comers)

    def _event(self) -> Event:
        event = super()._event()
        if not isinstance(event, Tick):
            return event
        there = self.comers & event.enrolled
        return replace(event, enrolled=there, trainers=there & event.trainers)


def two_runs(seed: int, fewest: tuple[int, int], *, one_group: bool) -> TwoRuns:
    """A run of {a, …, f} and one of {a, b, c, g, h, i}, or of larger groups and half of all sites."""
    first = TwoRuns(rules(fewest[0], 1.0, contributors=True, seed=seed), Random(seed), comers=frozenset("abcdef"))  # noqa: S311
    first.go(900)
    again = replace(rules(fewest[1], 1.0, contributors=True, seed=seed), grouping=Grouping("again", seed, fewest[1]))
    second = first.second(again, frozenset("abcghij"), first.groups if one_group else ())
    second.go(900)
    return second


@pytest.mark.parametrize("fewest", [(3, 3), (3, 4), (4, 3)])
def test_nothing_computed_of_all_sums_of_two_runs_is_about_fewer_sites_than_a_group(fewest: tuple[int, int]) -> None:
    both = 0
    for seed in range(30):
        walked = two_runs(seed, fewest, one_group=True)
        assert min(walked.atoms(), default=3) >= 3
        both += bool(members(walked.groups) & set("ghij"))
    assert both > 20, "the second run has sums of its own"


def test_with_groups_of_each_run_s_own_sums_of_two_runs_tell_of_single_sites() -> None:
    assert {min(two_runs(seed, (3, 3), one_group=False).atoms()) for seed in range(30)} >= {1, 2}


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("contributors", [True, False])
def test_without_groups_the_sums_of_a_run_tell_of_single_sites(participation: float, contributors: bool) -> None:
    smallest = []
    for seed in range(10):
        walk = Walk(rules(1, participation, contributors=contributors, seed=seed), Random(seed))  # noqa: S311
        walk.go(1500)
        smallest.append(min(walk.atoms()))
    assert set(smallest) == {1}


def test_newcomers_wait_until_they_are_a_group_and_no_round_waits_for_them() -> None:
    what, known = rules(3, 1.0, contributors=False), OF_THREE.formed(frozenset("abc"))
    for there, cohort in (("abcd", "abc"), ("abcde", "abc"), ("abcdef", "abcdef")):
        sites = frozenset(there)
        phase, _ = advance(what, Idle(1), Tick(0.0, sites, sites, NOBODY, groups=known))
        assert isinstance(phase, Collecting)
        assert phase.cohort == frozenset(cohort)


def test_a_run_of_a_few_sites_waits_for_the_one_that_is_missing() -> None:
    what, five = rules(3, 1.0, contributors=False), frozenset("abcde")
    known = OF_THREE.formed(five)
    assert known == (tuple("abcde"),)
    without = Tick(0.0, five, five - {"e"}, NOBODY, groups=known)
    assert advance(what, Idle(2), without)[0] == Idle(2, since=0.0)
    phase, _ = advance(what, Idle(2), Tick(0.0, five, five, NOBODY, groups=known))
    for site in "abcd":
        phase, _ = advance(what, phase, Arrived(site, 1.0))
    assert isinstance(phase, Collecting)
    assert not phase.has_quorum
    phase, _ = advance(what, phase, Tick(599.0, five, five - {"e"}, NOBODY, groups=known))
    assert isinstance(phase, Collecting)
    assert isinstance(advance(what, phase, Arrived("e", 599.0))[0], Summing)
    phase, (effect,) = advance(what, phase, Tick(600.0, five, five, NOBODY, groups=known))
    assert isinstance(phase, Idle)
    assert "4 updates at the deadline, 0 of them in whole groups, quorum 3" in repr(effect)


def test_the_server_knows_the_names_of_all_models_and_no_others() -> None:
    assert list(MODELS) == sorted(architectures)


def test_a_model_of_the_catalogue_or_of_the_sites_own_is_let_through_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*MODELS, "hospital.models:build"):
        check_model(recipe(model={"name": name}))
    for name, said in (
        ("resnet81", r"unknown model 'resnet81': did you mean 'resnet18'\?"),
        ("zzz", r"expected one of: .*, simple-cnn\. A model of the sites' own"),
        ("our-cnn", "unknown model 'our-cnn'"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_model(recipe(model={"name": name}))
    monkeypatch.setattr(plugins, "_allowed", {"our-cnn"})  # which the settings list, and which need not be installed
    check_model(recipe(model={"name": "our-cnn"}))


@pytest.mark.parametrize(
    ("federation", "count"),
    [
        ({"min_sites": 2, "quorum": 2}, 0),
        ({"min_sites": 3, "quorum": 1}, 1),  # too few for a first model
        ({"min_sites": 2, "quorum": 3}, 1),
        ({"min_sites": 3, "quorum": 2}, 1),
        ({"min_sites": 2, "quorum": 1.0}, 0),
        ({"min_sites": 2, "quorum": 2, "required_sites": ["north"]}, 0),
        ({"min_sites": 2, "quorum": 2, "required_sites": ["norht"]}, 1),
        ({"min_sites": 2, "quorum": 5, "required_sites": ["norht", "x"]}, 3),
    ],
)
def test_what_is_unmet_is_listed(federation: dict[str, Any], count: int) -> None:
    assert len(unmet(recipe(federation=federation), frozenset({"north", "south"}))) == count


def test_it_says_what_is_needed_who_there_is_and_the_nearest_name() -> None:
    asked = recipe(federation={"min_sites": 2, "quorum": 3, "required_sites": ["norht"]})
    trainers, required = unmet(asked, frozenset({"north", "south"}))
    assert trainers.startswith("3 trainers are needed (min_sites = 2, quorum = 3), and 2 may take part: north, south;")
    assert required.startswith("required_sites names 'norht'")
    assert required.endswith("did you mean 'north'?")


def test_groups_of_earlier_runs_that_are_too_small_or_not_whole_are_named_with_what_dissolves_them() -> None:
    asked = {"secure": True, "sum_group": 3, "min_sites": 3, "quorum": 3}
    sites, groups = frozenset("abcd"), (("a", "b", "c"),)
    assert unmet(recipe(federation=asked), sites, groups) == []
    (small,) = unmet(recipe(federation={**asked, "sum_group": 4, "min_sites": 4, "quorum": 4}), sites, groups)
    assert small.startswith("the group a, b, c has 3 sites, and the run's have 4 or more: ")
    assert "`protofed sites regroup a`" in small
    (lacking,) = unmet(recipe(federation=asked), frozenset("abde"), groups)
    assert lacking.startswith("the group a, b, c is without c: ")
    assert "`protofed client consortium --forget-group`" in lacking
    assert unmet(recipe(federation=asked), frozenset("abdef"), groups) == []
