"""The refinement of a round: who is asked, how often, and what becomes of an evaluator that does not answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.server.rounds.machine.test_advance import DEADLINE, rules, tick

from protofed.server.rounds.machine.advance import advance
from protofed.server.rounds.machine.phases import (
    NOBODY,
    Abandon,
    Aggregate,
    Aggregated,
    Aggregating,
    Arrived,
    AskRefinement,
    AskScores,
    Collecting,
    Declined,
    Evaluating,
    Finish,
    FinishedPhase,
    Idle,
    Insufficient,
    Recall,
    Refine,
    Refining,
)
from protofed.server.rounds.machine.rules import RoundRules
from protofed.server.verdicts import RoundOutcome


def refined(**federation: Any) -> RoundRules:
    return replace(rules(heartbeat_s=5.0, **federation), refined=True)


def asked(evaluator: str = "e", **fields: Any) -> Refining:
    return Refining(1, 1, **{"opened": 0.0, "requested": frozenset(evaluator), **fields})


def collected(round: int) -> Collecting:
    return Collecting(round, 1, frozenset("ab"), size=2, quorum=2, opened=0.0, reported=frozenset("a"))


@pytest.mark.parametrize(("round", "to_refine"), [(0, False), (1, True)])
def test_what_sites_trained_is_refined_and_the_first_model_is_not(round: int, to_refine: bool) -> None:
    phase, (effect,) = advance(refined(), collected(round), Arrived("b", 1.0))
    assert isinstance(phase, Aggregating)
    assert (phase.to_refine, effect) == (to_refine, Aggregate(phase, complete=True))
    after, _ = advance(refined(score_every=0), phase, Aggregated(2.0, NOBODY))
    assert after == (Refining(1, 1, opened=2.0) if to_refine else Idle(1))
    plain, _ = advance(rules(), collected(round), Arrived("b", 1.0))
    assert plain == Aggregating(round, 1, frozenset("ab"), 2)


def test_one_evaluator_is_asked_and_no_trainer() -> None:
    for paused in (False, True):  # an open round goes on
        now = tick(3.0, trainers="abcd", evaluators="ez", paused=paused)
        phase, effects = advance(refined(), Refining(1, 1, 2.0), now)
        assert phase == asked("e", opened=3.0)
        assert effects == [AskRefinement(asked("e", opened=3.0))]
    for event in (Arrived("z", 1.0), Declined("z", 1.0), Arrived("a", 1.0)):
        assert advance(refined(), asked(), event) == (asked(), [])


def test_what_it_made_is_published_and_scored() -> None:
    phase, effects = advance(refined(), asked(tries=1), Arrived("e", 5.0))
    assert phase == Aggregating(1, 1, frozenset("e"), quorum=1, tries=1, refines=True)
    assert effects == [Refine(phase)]
    assert advance(refined(), asked(tries=1, reported=frozenset("e")), tick(0.0)) == (phase, effects)  # a restart
    phase, effects = advance(refined(), phase, Aggregated(6.0, frozenset("e")))
    assert phase == Evaluating(1, frozenset("e"), 6.0, attempt=1)
    assert effects == [AskScores(phase)]


def test_without_an_evaluator_the_round_waits_and_keeps_its_aggregate() -> None:
    what, waits = refined(site_wait_timeout_s=500.0), Refining(1, 1, 10.0)
    assert advance(what, waits, tick(509.0)) == (waits, [])
    phase, effects = advance(what, waits, tick(510.0))
    assert isinstance(phase, FinishedPhase)
    assert phase.outcome is RoundOutcome.FAILED
    assert effects == [Finish(phase)]


def test_one_that_declines_is_passed_over_for_another_and_asked_again_where_there_is_none() -> None:
    phase, effects = advance(refined(), asked(), Declined("e", 7.0, "data"))
    assert phase == Refining(1, 1, 7.0, passed=frozenset("e"), tries=1, again_at=17.0)
    assert effects == []  # it has closed its invitation itself
    assert advance(refined(), phase, tick(16.0, evaluators="ez")) == (phase, [])
    other, _ = advance(refined(), phase, tick(17.0, evaluators="ez"))
    assert isinstance(other, Refining)
    assert other.requested == frozenset("z")
    same, _ = advance(refined(), phase, tick(17.0, evaluators="e"))
    assert isinstance(same, Refining)
    assert (same.requested, same.tries) == (frozenset("e"), 1)


def test_one_that_is_late_is_recalled() -> None:
    assert advance(refined(), asked(), tick(DEADLINE - 1, evaluators="e")) == (asked(), [])
    phase, effects = advance(refined(), asked(), tick(DEADLINE, evaluators="e"))
    assert isinstance(phase, Refining)
    assert (phase.requested, phase.tries, phase.passed) == (NOBODY, 1, frozenset("e"))
    assert [type(effect) for effect in effects] == [Recall]


def test_one_that_is_lost_may_come_back_unless_there_is_another() -> None:
    assert advance(refined(), asked(), tick(1.0)) == (asked(), [])
    phase, effects = advance(refined(), asked(), tick(1.0, evaluators="z"))
    assert isinstance(phase, Refining)
    assert phase.passed == frozenset("e")
    assert [type(effect) for effect in effects] == [Recall]
    tried = asked(passed=frozenset("z"))  # which could not do it either
    assert advance(refined(), tried, tick(1.0, evaluators="z")) == (tried, [])


def test_after_so_many_attempts_the_run_fails_and_no_training_was_given_up() -> None:
    what = refined(max_attempts=2)
    again, _ = advance(what, asked(), Declined("e", 7.0, "data"))
    assert isinstance(again, Refining)
    phase, effects = advance(what, replace(again, requested=frozenset("e")), Declined("e", 20.0, "data"))
    assert isinstance(phase, FinishedPhase)
    assert phase.outcome is RoundOutcome.FAILED
    assert effects == [Finish(phase)]
    assert not any(isinstance(effect, Abandon) for effect in effects)


def test_what_cannot_be_used_is_asked_for_again() -> None:
    damaged = Aggregating(1, 1, frozenset("e"), quorum=1, tries=1, refines=True)
    phase, effects = advance(refined(), damaged, Insufficient("its blob is damaged", 9.0))
    assert phase == Refining(1, 1, 9.0, passed=frozenset("e"), tries=2, again_at=29.0)
    assert effects == []
