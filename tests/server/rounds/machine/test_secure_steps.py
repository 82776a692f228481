"""The steps of a secure aggregation as pure transitions: one by one, and under random events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.common.config.recipe import Federation
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import MAX_SECURE_SITES, SUM_STEPS, TaskKind
from protofed.common.secure_aggregation.keys import threshold
from protofed.server.rounds.machine.advance import advance
from protofed.server.rounds.machine.phases import (
    NOBODY,
    Abandon,
    Aggregate,
    Aggregating,
    Arrived,
    AskStep,
    Collecting,
    Declined,
    Effect,
    Event,
    FinishedPhase,
    Idle,
    Insufficient,
    Phase,
    Sites,
    Summing,
    Tick,
)
from protofed.server.rounds.machine.rules import Grouping, RoundRules

FIVE = frozenset("abcde")
STEP_S = 60.0


def first(round: int, available: Sequence[SiteId], size: int) -> frozenset[SiteId]:
    return frozenset(available[:size])


def rules(*, contributors: bool = True, **federation: Any) -> RoundRules:
    table = {"secure": True, "min_sites": 3, "sum_step_s": STEP_S, "sum_group": 1, **federation}
    what = Federation.model_validate(table)
    return RoundRules(
        3, what, first, secure=True, contributors=contributors, grouping=Grouping("run", 0, what.sum_group)
    )


def collecting(cohort: Sites = FIVE, **fields: Any) -> Collecting:
    values = {"reported": cohort - {"e"}, "quorum_at": 0.0, **fields}
    return Collecting(1, 1, cohort, size=len(cohort), quorum=3, opened=0.0, **values)


def summing(step: TaskKind, cohort: Sites = FIVE, *, contributors: bool = True, **fields: Any) -> Summing:
    _, effects = advance(rules(contributors=contributors), collecting(), Arrived("e", 0.0))
    (ask,) = effects
    assert isinstance(ask, AskStep)
    return replace(ask.phase, step=step, cohort=cohort, **fields)


def reported(phase: Phase, sites: str, what: RoundRules | None = None) -> tuple[Phase, list[Effect]]:
    effects: list[Effect] = []
    for site in sites:
        phase, effects = advance(what or rules(), phase, Arrived(site, 1.0))
    return phase, effects


def tick(now: float, alive: Sites = FIVE) -> Tick:
    return Tick(now, FIVE, alive, NOBODY)


def test_the_sites_that_have_reported_are_the_roster_and_are_asked_to_share() -> None:
    phase, (effect,) = advance(rules(), collecting(), Arrived("e", 7.0))
    assert isinstance(phase, Summing)
    assert (phase.step, phase.roster, phase.cohort, phase.opened) == (TaskKind.SHARE, FIVE, FIVE, 7.0)
    assert effect == AskStep(phase, complete=True)
    phase, (effect,) = advance(rules(deadline_s=100.0), collecting(), tick(100.0))
    assert isinstance(phase, Summing)
    assert phase.roster == FIVE - {"e"}
    assert effect == AskStep(phase, complete=False)


def test_more_sites_than_a_sum_takes_are_not_invited_and_required_ones_are() -> None:
    many = frozenset(f"{number:02}" for number in range(MAX_SECURE_SITES + 2))
    what = rules(required_sites=["51"], over_selection=2)
    phase, _ = advance(what, Idle(1), Tick(0.0, many, many, NOBODY))
    assert isinstance(phase, Collecting)
    assert len(phase.cohort) == phase.size == MAX_SECURE_SITES
    assert "51" in phase.cohort


def test_the_first_model_is_no_sum() -> None:
    made = Collecting(0, 1, frozenset("ab"), 2, 2, 0.0, reported=frozenset("a"))
    phase, _ = advance(rules(), made, Arrived("b", 0.0))
    assert isinstance(phase, Aggregating)


@pytest.mark.parametrize("contributors", [True, False])
def test_steps_follow_each_other_and_end_with_the_aggregation(contributors: bool) -> None:
    what, phase = rules(contributors=contributors), summing(TaskKind.SHARE, contributors=contributors)
    seen: list[TaskKind] = []
    effects: list[Effect] = []
    current: Phase = phase
    while isinstance(current, Summing):
        seen.append(current.step)
        current, effects = reported(current, "abcde", what)
    assert seen == [step for step in SUM_STEPS if contributors or "contributors" not in step]
    assert current == Aggregating(1, 1, FIVE, 3)
    assert effects == [Aggregate(current, complete=True)]


def test_a_step_waits_for_those_that_are_alive_until_its_deadline() -> None:
    phase, effects = reported(summing(TaskKind.SHARE), "abcd")
    assert isinstance(phase, Summing)
    assert (phase.awaited, effects) == (frozenset("e"), [])
    assert advance(rules(), phase, tick(STEP_S - 1)) == (phase, [])
    for event in (tick(STEP_S), tick(2.0, FIVE - {"e"}), Declined("e", 2.0)):
        after, (effect,) = advance(rules(), phase, event)
        assert isinstance(after, Summing)
        assert (after.step, after.cohort, after.reported) == (TaskKind.CONTRIBUTORS, frozenset("abcd"), NOBODY)
        assert effect == AskStep(after)


def test_with_too_few_sites_the_attempt_is_abandoned_as_soon_as_that_is_certain() -> None:
    phase, _ = reported(summing(TaskKind.MASK, contributors=False), "abc")
    waiting, _ = advance(rules(contributors=False), phase, tick(5.0, frozenset("abc")))
    assert waiting == phase  # a lost one may come back
    for event in (tick(STEP_S), Insufficient("false shares", STEP_S)):
        after, (effect,) = advance(rules(contributors=False), phase, event)
        assert isinstance(after, Idle)
        assert isinstance(effect, Abandon)
        assert (after.tries, after.again_at) == (1, STEP_S + 10.0)
    phase, effects = advance(rules(contributors=False), phase, Declined("d", 5.0))
    assert effects == []
    after, (effect,) = advance(rules(contributors=False), phase, Declined("e", 5.0, "numeric"))
    assert isinstance(effect, Abandon)
    assert effect.reason == "mask of the secure aggregation: 3 of 5 sites, 4 are needed (the last, e: numeric)"


@pytest.mark.parametrize("step", [TaskKind.AGREE_CONTRIBUTORS, TaskKind.REVEAL_CONTRIBUTORS, TaskKind.MASK])
def test_nobody_may_drop_out_between_the_contributors_and_the_values_and_the_attempt_is_opened_again_at_once(
    step: TaskKind,
) -> None:
    after, (effect,) = advance(rules(), summing(step), Declined("e", 5.0))
    assert after == Idle(1, tries=1, again_at=0.0)
    assert isinstance(effect, Abandon)
    phase, _ = reported(summing(step), "abcd")
    assert advance(rules(), phase, tick(STEP_S))[0] == Idle(1, tries=1, again_at=0.0)


def test_numbers_of_fewer_sites_than_the_quorum_or_without_a_required_one_are_not_aggregated() -> None:
    phase, _ = reported(
        replace(summing(TaskKind.MASK, contributors=False), quorum=5), "abcd", rules(contributors=False)
    )
    assert isinstance(advance(rules(contributors=False), phase, tick(STEP_S))[0], Idle)
    lacks = replace(summing(TaskKind.SHARE), required=frozenset("e"))
    after, (effect,) = advance(rules(), lacks, Declined("e", 1.0))
    assert isinstance(after, Idle)
    assert isinstance(effect, Abandon)
    assert "without e no round counts" in effect.reason
    agreed = replace(summing(TaskKind.AGREE), survivors=FIVE, required=frozenset("e"))
    phase, _ = reported(agreed, "abcd")
    assert isinstance(advance(rules(), phase, tick(STEP_S))[0], Summing)  # its numbers are there


@dataclass
class Walk:
    """A sum on its way, watched at every step."""

    rules: RoundRules
    phase: Phase
    now: float = 0.0
    came: set[SiteId] = field(default_factory=set)
    masked: Sites = NOBODY
    counted: Sites = NOBODY

    def step(self, event: Event, seconds: float) -> None:
        self.now += seconds
        if isinstance(event, Tick | Arrived | Declined | Insufficient):
            event = replace(event, now=self.now)
        if isinstance(event, Arrived):
            self.came.add(event.site)
        before = self.phase
        self.phase, effects = advance(self.rules, before, event)
        for effect in effects:
            self._watch(before, effect)

    def _watch(self, before: Phase, effect: Effect) -> None:
        assert isinstance(before, Summing)
        assert before.reported <= before.cohort <= before.roster
        match effect:
            case AskStep(phase):
                assert SUM_STEPS.index(phase.step) > SUM_STEPS.index(before.step), "no step is asked for twice"
                assert phase.cohort <= before.cohort & self.came, "nobody comes back into a sum"
                assert len(phase.cohort) >= threshold(len(phase.roster))
                if phase.step is TaskKind.AGREE_CONTRIBUTORS:
                    self.counted = phase.cohort
                if phase.step is TaskKind.AGREE:
                    self.masked = phase.cohort
                    assert not phase.contributors or self.counted == phase.cohort, "those who were counted are summed"
                self.came = set()
            case Aggregate(phase, _):
                assert phase.sites == self.masked
                assert len(phase.sites) >= max(3, phase.quorum)
                assert phase.required <= phase.sites
            case _:
                assert isinstance(effect, Abandon) or isinstance(self.phase, FinishedPhase)


sites = st.sampled_from("abcdez")
events = st.one_of(
    sites.map(lambda site: Arrived(site, 0.0)),
    sites.map(lambda site: Arrived(site, 0.0)),
    sites.map(lambda site: Arrived(site, 0.0)),
    sites.map(lambda site: Declined(site, 0.0)),
    st.frozensets(sites).map(lambda alive: tick(0.0, alive)),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.booleans(), st.sampled_from([3, 4, 5]), st.frozensets(st.sampled_from("abc"), max_size=1), st.data())
def test_whatever_happens_only_those_are_aggregated_that_stayed(
    contributors: bool, quorum: int, required: Sites, data: st.DataObject
) -> None:
    what = rules(contributors=contributors)
    walk = Walk(what, replace(summing(TaskKind.SHARE, contributors=contributors), quorum=quorum, required=required))
    for event, seconds in data.draw(st.lists(st.tuples(events, st.sampled_from([0.0, 0.0, 0.0, 30.0])), max_size=80)):
        if not isinstance(walk.phase, Summing):
            break
        walk.step(event, seconds)
    for _ in SUM_STEPS:  # nobody answers any more
        if isinstance(walk.phase, Summing):
            walk.step(tick(0.0), STEP_S)
    assert not isinstance(walk.phase, Summing)
