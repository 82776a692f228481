"""The round machine: every pair (phase, event) is answered, and what must not happen does not.

A server that is killed goes on where the ledger says: nothing counts twice, nothing is lost, no bit differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import pytest

from protofed.common.config.recipe import Federation
from protofed.common.errors import FailureReason, NotEnrolledError, StateError
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import Finished, Role, Task, TaskKind, Verdict
from protofed.server.rounds.machine import phases
from protofed.server.rounds.machine.advance import Step, advance
from protofed.server.rounds.machine.phases import (
    NOBODY,
    Abandon,
    Aggregate,
    Aggregated,
    Aggregating,
    Arrived,
    AskRefinement,
    AskScores,
    Broken,
    Collecting,
    Declined,
    Effect,
    Evaluating,
    Event,
    Finish,
    FinishedPhase,
    Idle,
    Insufficient,
    Open,
    Phase,
    Recall,
    Refine,
    Refining,
    ScoresArrived,
    Stop,
    Tick,
)
from protofed.server.rounds.machine.rules import RoundRules, compute_quorum
from protofed.server.storage.blobs import Blobs
from protofed.server.storage.ledger import Ledger
from protofed.server.verdicts import RoundOutcome

if TYPE_CHECKING:
    from tests.server.conftest import Fragile, Lab, Later, MakeLab

DEADLINE = 100.0
ROUNDS = 3


def first(round: int, available: Sequence[SiteId], size: int) -> frozenset[SiteId]:
    """A sampler whose choice is easy to foresee."""
    return frozenset(available[:size])


def rules(rounds: int = ROUNDS, **federation: Any) -> RoundRules:
    return RoundRules(rounds, Federation(**{"deadline_s": DEADLINE, "score_deadline_s": DEADLINE, **federation}), first)


def tick(now: float = 0.0, trainers: str = "abcd", evaluators: str = "", enrolled: str = "abcd", **fields: Any) -> Tick:
    """Time and who is there, a letter a site."""
    return Tick(now, frozenset(enrolled), frozenset(trainers), frozenset(evaluators), **fields)


def collecting(cohort: str = "abcd", *, quorum: int = 2, **fields: Any) -> Collecting:
    """Round 1, opened at 0 for all the cohort."""
    known = {"round": 1, "attempt": 1, "size": len(cohort), "opened": 0.0, **fields}
    return Collecting(cohort=frozenset(cohort), quorum=quorum, **known)


def closed(sites: str, *, quorum: int = 2, **fields: Any) -> Aggregating:
    """Round 1 of `collecting`, being aggregated."""
    return Aggregating(1, 1, frozenset(sites), quorum=quorum, **fields)


def walk(what: RoundRules, phase: Phase, *events: Event) -> tuple[Phase, list[Effect]]:
    """The phase after all events, and everything that they asked for."""
    effects: list[Effect] = []
    for event in events:
        phase, asked = advance(what, phase, event)
        effects += asked
    return phase, effects


# Every pair

PHASES: dict[str, Phase] = {
    "idle-0": Idle(0),
    "idle-1": Idle(1),
    "idle-last-attempt": Idle(2, tries=4),
    "collecting-0": Collecting(0, 1, frozenset("e"), size=1, quorum=1, opened=0.0),
    "collecting-fresh": collecting(),
    "collecting-one-short": collecting(reported=frozenset("abc"), quorum_at=5.0),
    "collecting-quorum": collecting(reported=frozenset("ab"), quorum_at=5.0),
    "collecting-failing": collecting(failed=frozenset("ab"), attempt=5, tries=4),
    "collecting-more-than-needed": collecting(size=2, reported=frozenset("a")),
    "aggregating-0": Aggregating(0, 1, frozenset("e")),
    "aggregating-1": Aggregating(1, 2, frozenset("ab")),
    "aggregating-last-attempt": Aggregating(1, 5, frozenset("ab"), 2, tries=4),
    "idle-waiting": Idle(1, since=0.0),
    "aggregating-last": Aggregating(ROUNDS, 1, frozenset("ab")),
    "aggregating-to-refine": Aggregating(1, 1, frozenset("ab"), to_refine=True),
    "aggregating-refined": Aggregating(1, 1, frozenset("e"), 1, refines=True),
    "aggregating-refined-last-attempt": Aggregating(1, 1, frozenset("e"), 1, tries=4, refines=True),
    "refining-fresh": Refining(1, 1, 0.0),
    "refining-asked": Refining(1, 1, 0.0, requested=frozenset("e")),
    "refining-reported": Refining(1, 1, 0.0, requested=frozenset("e"), reported=frozenset("e")),
    "refining-again": Refining(1, 1, 0.0, passed=frozenset("e"), tries=1, again_at=50.0),
    "refining-last-attempt": Refining(ROUNDS, 1, 0.0, requested=frozenset("a"), tries=4),
    "evaluating-1": Evaluating(1, frozenset("ab"), 0.0),
    "evaluating-one-left": Evaluating(1, frozenset("a"), 0.0),
    "evaluating-nobody": Evaluating(1, NOBODY, 0.0),
    "evaluating-last": Evaluating(ROUNDS, frozenset("a"), 0.0),
    "finished": FinishedPhase("completed", RoundOutcome.COMPLETED),
    "failed": FinishedPhase("broken", RoundOutcome.FAILED),
}
EVENTS: dict[str, Event] = {
    "tick-early": tick(1.0, evaluators="e"),
    "tick-after-grace": tick(70.0),
    "tick-late": tick(1e6),
    "tick-paused": tick(1.0, paused=True),
    "insufficient": Insufficient("two updates are damaged", 2.0),
    "tick-alone": tick(1.0, trainers="", enrolled=""),
    "tick-others": tick(1.0, trainers="xyz", enrolled="xyz"),
    "tick-late-and-alone": tick(1e6, trainers="", enrolled=""),
    "arrived-a": Arrived("a", 2.0),
    "arrived-d": Arrived("d", 2.0),
    "arrived-e": Arrived("e", 2.0),
    "arrived-stranger": Arrived("x", 2.0),
    "declined-a": Declined("a", 2.0),
    "declined-c": Declined("c", 2.0),
    "declined-e": Declined("e", 2.0),
    "declined-stranger": Declined("x", 2.0),
    "aggregated": Aggregated(3.0, frozenset("ae")),
    "aggregated-unscored": Aggregated(3.0, NOBODY),
    "scored-a": ScoresArrived("a"),
    "scored-stranger": ScoresArrived("x"),
    "broken": Broken("disk"),
    "stop": Stop("operator"),
}
ENDS = {(Broken, FinishedPhase), (Stop, FinishedPhase)}
LEADS: dict[type[Any], set[tuple[type[Any], type[Any]]]] = {  # (event, phase): all that may lead somewhere else
    Idle: {(Tick, Collecting), (Tick, FinishedPhase), *ENDS},
    Collecting: {(event, to) for event in (Tick, Arrived, Declined) for to in (Aggregating, Idle, FinishedPhase)}
    | ENDS,
    Aggregating: {
        *((Aggregated, to) for to in (Evaluating, Refining, Idle, FinishedPhase)),
        *((Insufficient, to) for to in (Refining, Idle, FinishedPhase)),
        *ENDS,
    },
    Refining: {
        *((Tick, to) for to in (Aggregating, FinishedPhase)),
        *((Arrived, Aggregating), (Declined, FinishedPhase)),
        *ENDS,
    },
    Evaluating: {(event, to) for event in (Tick, ScoresArrived, Declined) for to in (Idle, FinishedPhase)} | ENDS,
    FinishedPhase: set(),
}
ASKS: dict[tuple[type[Any], type[Any]], set[type[Any]]] = {  # what a change of phase asks for
    (Idle, Collecting): {Open},
    (Collecting, Aggregating): {Aggregate},
    (Collecting, Idle): {Abandon},
    (Aggregating, Evaluating): {AskScores},
    (Aggregating, Refining): set(),
    (Refining, Aggregating): {Refine},
    (Evaluating, Idle): set(),
}


def well_typed(thing: Any) -> bool:
    """Whether every field is a frozen set or a tuple of names, a number, a word, or a phase."""
    return all(
        isinstance(value, frozenset | tuple | int | float | str | None | Phase)
        for value in (getattr(thing, f.name) for f in dataclasses.fields(thing))
    )


@pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES)
@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_every_pair_is_answered_and_none_leads_where_the_drawing_has_no_arrow(phase: Phase, event: Event) -> None:
    answer, effects = advance(rules(), phase, event)
    assert isinstance(answer, get_args(Phase))
    assert well_typed(answer)
    assert all(isinstance(effect, get_args(Effect)) and well_typed(effect) for effect in effects)
    if isinstance(answer, Collecting):
        assert answer.reported | answer.failed <= answer.cohort
        assert not answer.reported & answer.failed
    if isinstance(answer, Refining) and isinstance(phase, Refining):
        recalled = phase.requested - answer.requested if isinstance(event, Tick) else NOBODY
        wanted = [*([AskRefinement] if answer.requested - phase.requested else []), *([Recall] if recalled else [])]
        assert [type(effect) for effect in effects] == wanted
        return
    if type(answer) is type(phase):
        assert effects == []
        return
    assert (type(event), type(answer)) in LEADS[type(phase)]
    asked = {type(effect) for effect in effects}
    if isinstance(answer, FinishedPhase):
        assert asked in ({Finish}, {Abandon, Finish})
    elif isinstance(phase, Aggregating) and isinstance(answer, Idle):
        assert asked == ({Abandon} if isinstance(event, Insufficient) else set())
    else:
        assert asked == ASKS[type(phase), type(answer)]


@pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES)
@pytest.mark.parametrize("event", [Stop("enough"), Broken("enough")], ids=["stop", "broken"])
def test_stop_and_broken_end_every_phase(phase: Phase, event: Stop | Broken) -> None:
    answer, effects = advance(rules(), phase, event)
    if isinstance(phase, FinishedPhase):
        assert (answer, effects) == (phase, [])
        return
    end = FinishedPhase("enough", RoundOutcome.FAILED if isinstance(event, Broken) else RoundOutcome.ABORTED)
    assert (answer, effects) == (end, [Finish(end)])


# Opening a round


@pytest.mark.parametrize(
    ("federation", "trainers"),
    [
        ({"min_sites": 3}, "ab"),
        ({"min_sites": 1, "quorum": 3}, "ab"),
        ({"min_sites": 1, "quorum": 1.0}, "abc"),  # four are enrolled, so a round needs four
        ({"min_sites": 1, "quorum": 0.5}, "a"),
        ({"min_sites": 1}, ""),
    ],
)
def test_a_round_does_not_open_with_too_few_sites(federation: dict[str, Any], trainers: str) -> None:
    assert advance(rules(**federation), Idle(1), tick(trainers=trainers)) == (Idle(1, since=0.0), [])


@pytest.mark.parametrize("trainers", ["", "a"])
def test_nor_does_round_0_before_two_trainers_are_there(trainers: str) -> None:
    assert advance(rules(), Idle(0), tick(trainers=trainers, evaluators="xyz")) == (Idle(0, since=0.0), [])


def test_nor_any_while_the_run_is_paused() -> None:
    assert advance(rules(), Idle(1), tick(1.0, paused=True)) == (Idle(1, since=1.0), [])


def test_a_round_opens_for_all_sites_and_counts_those_enrolled() -> None:
    phase, effects = advance(rules(quorum=0.5), Idle(2, 2), tick(7.0, trainers="abc", enrolled="abcdefgh", attempt=3))
    opened = Collecting(2, 3, frozenset("abc"), size=8, quorum=4, opened=7.0, tries=2, enrolled=8)
    assert phase == Idle(2, 2, since=7.0)  # three are no quorum of eight
    assert effects == []
    phase, effects = advance(rules(quorum=0.25), Idle(2, 2), tick(7.0, trainers="abc", enrolled="abcdefgh", attempt=3))
    assert phase == replace(opened, quorum=2)
    assert effects == [Open(replace(opened, quorum=2))]


@pytest.mark.parametrize(
    ("federation", "cohort", "size", "quorum"),
    [
        ({"participation": 0.5, "over_selection": 1.5, "quorum": 0.5}, "abc", 2, 1),
        ({"participation": 0.25, "quorum": 3}, "abc", 3, 3),  # a quorum larger than the share enlarges the round
        ({"participation": 0.5, "required_sites": ("d",)}, "ad", 2, 1),  # who must take part is drawn first,
        ({"participation": 0.25, "quorum": 1, "required_sites": ("b", "c", "d")}, "bcd", 3, 1),  # and enlarges it, too
    ],
)
def test_the_size_is_a_share_of_the_enrolled_and_the_cohort_that_many_times_more(
    federation: dict[str, Any], cohort: str, size: int, quorum: int
) -> None:
    phase, _ = advance(rules(**federation), Idle(1), tick(evaluators="ez"))
    assert isinstance(phase, Collecting)
    assert (phase.cohort, phase.size, phase.quorum, phase.enrolled) == (frozenset(cohort), size, quorum, 4)


def test_a_product_that_rounds_up_does_not_invite_one_site_more() -> None:
    names = frozenset(f"s{i:03}" for i in range(100))
    phase, _ = advance(rules(participation=0.07, over_selection=1.1), Idle(1), Tick(0.0, names, names, NOBODY))
    assert isinstance(phase, Collecting)
    assert (phase.size, len(phase.cohort)) == (7, 8)  # 0.07 * 100 and 7 * 1.1 exceed 7 and 7.7 in floating point
    assert compute_quorum(rules(quorum=0.07).federation, 100) == 7


# Sites that must take part, pauses and patience


def test_a_round_waits_for_the_sites_that_must_take_part() -> None:
    what = rules(required_sites=("c",))
    assert advance(what, Idle(1), tick(1.0, trainers="abd"))[0] == Idle(1, since=1.0)
    phase, _ = advance(what, Idle(1), tick(1.0, trainers="abcd"))
    assert isinstance(phase, Collecting)
    assert phase.required == frozenset("c")


def test_a_round_is_not_closed_without_a_site_that_must_take_part() -> None:
    required = collecting(required=frozenset("d"))
    phase, effects = walk(rules(), required, *(Arrived(site, 1.0) for site in "abc"), tick(99.0))
    assert (effects, isinstance(phase, Collecting)) == ([], True)
    _, effects = advance(rules(), phase, Arrived("d", 99.0))
    assert effects == [Aggregate(closed("abcd", required=frozenset("d")), complete=True)]
    _, effects = advance(rules(), phase, tick(100.0))
    assert effects == [Abandon(1, 1, "3 updates at the deadline, quorum 2; without d no round counts")]


def test_a_site_that_must_take_part_and_cannot_abandons_at_once() -> None:
    phase, effects = advance(rules(), collecting(required=frozenset("d")), Declined("d", 1.0, "disk"))
    assert phase == Idle(1, tries=1, again_at=11.0)
    why = "1 of 4 sites cannot do the task: d (last reason: disk); without d no round counts"
    assert effects == [Abandon(1, 1, why)]


@pytest.mark.parametrize("secure", [False, True])
def test_a_round_that_policies_end_says_what_they_most_often_ask_for(secure: bool) -> None:
    asked = rules(secure=secure)
    _, effects = advance(asked, collecting(required=frozenset("d")), Declined("d", 1.0, "policy"))
    (effect,) = effects
    assert isinstance(effect, Abandon)
    why = effect.reason
    assert "(last reason: policy; the site's log names the rule" in why
    assert ("ask for federation.secure = true" in why) is not secure


def test_a_run_that_waits_too_long_for_its_sites_fails_with_the_reason_and_a_pause_costs_no_patience() -> None:
    what = rules(site_wait_timeout_s=50.0)
    phase, effects = walk(what, Idle(2), tick(10.0, trainers=""), tick(59.0, trainers=""))
    assert (phase, effects) == (Idle(2, since=10.0), [])
    phase, _ = advance(what, phase, tick(60.0, trainers=""))
    assert phase == FinishedPhase("waited 50 s for enough sites to open round 2", RoundOutcome.FAILED)
    phase, _ = walk(what, Idle(2), tick(0.0, trainers=""), tick(100.0, trainers="", paused=True))
    assert advance(what, phase, tick(149.0, trainers=""))[0] == Idle(2, since=100.0)


# Updates that are rejected


def test_what_is_left_must_be_a_quorum_with_all_that_must_take_part_or_the_round_is_opened_again() -> None:
    phase, effects = advance(rules(), Aggregating(1, 3, frozenset("ab"), 2, tries=1), Insufficient("damaged", 7.0))
    assert (phase, effects) == (Idle(1, tries=2, again_at=27.0), [Abandon(1, 3, "damaged")])
    closing = Aggregating(1, 1, frozenset("abcd"), quorum=2, required=frozenset("a"))
    assert [closing.is_short(frozenset(left)) for left in ("ab", "a", "bcd")] == [False, True, True]


# Round 0


def test_round_0_asks_two_trainers_and_no_evaluator() -> None:
    what = rules(min_sites=4, required_sites=("c",))  # which is for rounds that count
    phase, effects = advance(what, Idle(0), tick(3.0, trainers="cab", evaluators="az"))
    opened = Collecting(0, 1, frozenset("ab"), size=2, quorum=2, opened=3.0, enrolled=4)
    assert (phase, effects) == (opened, [Open(opened)])


@pytest.mark.parametrize("single", [{"min_sites": 1}, {"min_contributors": 1}])
def test_one_site_makes_the_model_where_one_may_make_a_round_or_a_class(single: dict[str, int]) -> None:
    phase, _ = advance(rules(**single), Idle(0), tick(trainers="a"))
    assert isinstance(phase, Collecting)
    assert (phase.cohort, phase.size, phase.quorum) == (frozenset("a"), 1, 1)


def test_round_0_asks_all_trainers_after_a_failure_and_waits_for_them() -> None:
    phase, effects = walk(rules(), Idle(0), tick(1.0, trainers="abc"), Declined("a", 1.0))
    assert [type(effect) for effect in effects] == [Open, Abandon]
    phase, _ = advance(rules(), phase, tick(1.0, trainers="abc"))
    assert isinstance(phase, Collecting)
    assert (phase.cohort, phase.size, phase.quorum) == (frozenset("abc"), 3, 2)
    phase, effects = walk(rules(), phase, Arrived("b", 2.0), Arrived("c", 2.0))
    assert isinstance(phase, Collecting)  # the third may agree with one of them
    _, effects = advance(rules(), phase, Declined("a", 3.0))
    assert [type(effect) for effect in effects] == [Aggregate]


def seconds_of_round_0(what: RoundRules, failure: Callable[[Phase, float], Step]) -> list[float]:
    """When each attempt opened, until the run failed; every attempt fails at once."""
    phase: Phase = Idle(0)
    now, opened = 0.0, list[float]()
    while not isinstance(phase, FinishedPhase):
        assert isinstance(phase, Idle)
        now = max(now, phase.again_at)
        collecting_now, _ = advance(what, phase, tick(now))
        opened.append(now)
        phase, _ = failure(collecting_now, now)
    return opened


def all_decline(what: RoundRules) -> Callable[[Phase, float], Step]:
    def fail(phase: Phase, now: float) -> Step:
        assert isinstance(phase, Collecting)
        return walk(what, phase, *(Declined(site, now) for site in sorted(phase.cohort)))

    return fail


def models_differ(what: RoundRules) -> Callable[[Phase, float], Step]:
    def fail(phase: Phase, now: float) -> Step:
        assert isinstance(phase, Collecting)
        return walk(what, phase, *(Arrived(site, now) for site in sorted(phase.cohort)), Insufficient("differ", now))

    return fail


@pytest.mark.parametrize("failing", [all_decline, models_differ])
def test_the_attempts_at_the_first_model_last_150_s_by_default_and_the_second_begins_at_once(
    failing: Callable[[RoundRules], Callable[[Phase, float], Step]],
) -> None:
    what = RoundRules(ROUNDS, Federation(), first)
    opened = seconds_of_round_0(what, failing(what))
    assert opened == [0.0, 0.0, 40.0, 120.0, 280.0]
    training = sum(what.pause(1, tries) for tries in range(1, what.federation.max_attempts))
    assert opened[-1] >= training == 150.0


def test_a_simulation_does_not_wait_for_another_first_model() -> None:
    what = replace(RoundRules(ROUNDS, Federation(), first), in_time=False)
    assert set(seconds_of_round_0(what, all_decline(what))) == {0.0}


def test_the_first_model_is_not_scored() -> None:
    phase, effects = advance(rules(), Aggregating(0, 1, frozenset("z")), Aggregated(1.0, frozenset("az")))
    assert (phase, effects) == (Idle(1), [])


# Closing


def came(sites: str, now: float = 1.0) -> list[Event]:
    return [Arrived(site, now) for site in sites]


HALF = [*came("a", 10.0), *came("b", 20.0)]
NEEDED = collecting(size=2, required=frozenset("d"))
CLOSING: dict[str, tuple[dict[str, Any], Collecting, list[Event], tuple[str, bool] | None]] = {  # closed, complete
    "a complete round closes at once": ({}, collecting("abc"), came("abc"), ("abc", True)),
    "one update is no quorum of two": ({}, collecting(), came("a"), None),
    "a quorum waits for the rest until grace is over": ({"grace": 0.5}, collecting(), [*HALF, tick(69.9)], None),
    "and no longer": ({"grace": 0.5}, collecting(), [*HALF, tick(70.0)], ("ab", False)),
    "which no further update renews": (
        {"grace": 0.5},
        collecting(),
        [*HALF, *came("c", 60.0), tick(70.0)],
        ("abc", False),
    ),
    "no grace without a quorum": ({"grace": 0.0}, collecting(quorum=3), [*came("ab"), tick(99.0)], None),
    "with no grace the quorum closes it": ({"grace": 0.0}, collecting(), came("ab"), ("ab", False)),
    "a quorum does not wait for a lost site": ({}, collecting("abc"), [*came("ab"), tick(2.0, "ab")], ("ab", False)),
    "but for one that is alive": ({}, collecting("abc"), [*came("ab"), tick(2.0, "c")], None),
    "lost sites abandon nothing before the deadline": ({}, collecting(), [*came("a"), tick(99.9, "")], None),
    "one that comes back counts": ({}, collecting("ab"), [tick(50.0, ""), *came("ab", 60.0)], ("ab", True)),
    "a quorum counts at the deadline": (
        {"grace": 1.0},
        collecting(),
        [*came("a"), *came("b", 50.0), tick(100.0)],
        ("ab", False),
    ),
    "which counts from the opening": ({}, collecting(opened=1000.0), [tick(1050.0)], None),
    "a quorum after it and before a tick counts": ({}, collecting(), [*came("a"), *came("b", 130.0)], ("ab", False)),
    "who declined is not waited for": (
        {},
        collecting(),
        [*came("ab"), Declined("c", 2.0), Declined("d", 3.0)],
        ("ab", False),
    ),
    "over-selection does not close below the size": ({}, collecting(size=2), came("d"), None),
    "nor waits for all of the cohort": ({}, collecting(size=2), came("db"), ("bd", True)),
    "nor closes without who must take part": ({}, NEEDED, came("ab"), None),
    "and with it": ({}, NEEDED, came("abd"), ("abd", True)),
    "a cohort smaller than the size is complete": ({}, collecting("ab", size=4), came("ab"), ("ab", True)),
}


@pytest.mark.parametrize(("federation", "phase", "events", "expected"), CLOSING.values(), ids=CLOSING)
def test_when_a_round_closes(
    federation: dict[str, Any], phase: Collecting, events: list[Event], expected: tuple[str, bool] | None
) -> None:
    after, effects = walk(rules(**federation), phase, *events)
    if expected is None:
        assert (isinstance(after, Collecting), effects) == (True, [])
    else:
        sites, complete = expected
        end = closed(sites, quorum=phase.quorum, required=phase.required)
        assert (after, effects) == (end, [Aggregate(end, complete=complete)])


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([*came("a"), *came("b", 20.0), *came("c", 60.0)], collecting(reported=frozenset("abc"), quorum_at=20.0)),
        ([*came("a"), *came("a", 2.0)], collecting(reported=frozenset("a"))),
        ([Declined("a", 1.0), *came("a", 2.0)], collecting(reported=frozenset("a"))),  # an update counts all the same
        ([*came("a"), Declined("a", 2.0)], collecting(reported=frozenset("a"))),
        ([*came("x"), Declined("x", 1.0)], collecting()),
    ],
)
def test_a_site_counts_once_and_a_stranger_not_at_all(events: list[Event], expected: Collecting) -> None:
    assert walk(rules(), collecting(), *events) == (expected, [])


def test_at_the_deadline_without_a_quorum_the_same_round_begins_again() -> None:
    phase, effects = walk(rules(), collecting(), Arrived("a", 1.0), tick(100.0))
    assert phase == Idle(1, tries=1)
    assert effects == [Abandon(1, 1, "1 update at the deadline, quorum 2")]


def test_declined_sites_that_make_the_quorum_unreachable_abandon_at_once() -> None:
    phase, effects = walk(rules(), collecting(quorum=3), Declined("a", 1.0))
    assert isinstance(phase, Collecting)
    phase, effects = walk(rules(), phase, Declined("b", 1.0))
    assert phase == Idle(1, tries=1, again_at=11.0)
    assert effects == [Abandon(1, 1, "2 of 4 sites cannot do the task: a, b")]


@pytest.mark.parametrize(("tries", "pause_s"), [(0, 40.0), (1, 80.0), (2, DEADLINE), (3, DEADLINE)])
def test_after_sites_declined_a_round_is_opened_later_and_later(tries: int, pause_s: float) -> None:
    what = rules(heartbeat_s=20.0)
    phase, _ = advance(what, collecting(quorum=4, tries=tries), Declined("a", 7.0))
    assert phase == Idle(1, tries + 1, again_at=7.0 + pause_s)
    assert advance(what, phase, tick(6.9 + pause_s)) == (phase, [])
    opened, _ = advance(what, phase, tick(7.0 + pause_s))
    assert isinstance(opened, Collecting)
    simulated, _ = advance(replace(what, in_time=False), collecting(quorum=4, tries=tries), Declined("a", 7.0))
    assert isinstance(advance(what, simulated, tick(7.0))[0], Collecting)


def test_attempts_are_exhausted_in_the_end() -> None:
    phase, effects = advance(rules(max_attempts=2), collecting(attempt=1), tick(100.0))
    assert phase == Idle(1, tries=1)
    phase, effects = advance(rules(max_attempts=2), collecting(attempt=7, tries=1), tick(100.0))
    assert isinstance(phase, FinishedPhase)
    assert phase.failed
    assert "round 1 was abandoned 2 times" in phase.reason
    assert [type(effect) for effect in effects] == [Abandon, Finish]


def test_nothing_reopens_a_round_that_is_being_aggregated_and_an_unasked_aggregation_is_ignored() -> None:
    phase = Aggregating(1, 1, frozenset("ab"))
    noise: list[Event] = [Arrived("c", 1.0), Declined("c", 1.0), ScoresArrived("a"), tick(1e9)]
    assert walk(rules(), phase, *noise) == (phase, [])
    late = Aggregated(1.0, frozenset("a"))
    for other in (Idle(1), collecting(), Evaluating(1, frozenset("a"), 0.0)):
        assert advance(rules(), other, late) == (other, [])


# Scoring


@pytest.mark.parametrize(
    ("every", "scored"), [(0, [7]), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (7, [7]), (50, [7])]
)
def test_every_nth_round_and_always_the_last_is_scored(every: int, scored: list[int]) -> None:
    what = rules(rounds=7, score_every=every)
    done = Aggregated(1.0, frozenset("a"))
    steps = {number: advance(what, Aggregating(number, 1, frozenset("a")), done) for number in range(8)}
    assert [number for number, (phase, _) in steps.items() if isinstance(phase, Evaluating)] == scored
    assert all(isinstance(phase, Idle | Evaluating) for phase, _ in steps.values())
    evaluating = Evaluating(7, frozenset("a"), 1.0, attempt=1)
    assert steps[7] == (evaluating, [AskScores(evaluating)])


@pytest.mark.parametrize(("personal", "trainers"), [(None, [2, 4, 5]), (0, [5]), (1, [1, 2, 3, 4, 5]), (4, [4, 5])])
def test_sites_own_models_are_scored_at_a_pace_of_their_own(personal: int | None, trainers: list[int]) -> None:
    what = rules(rounds=5, score_every=2, score_personal_every=personal)
    done = Aggregated(1.0, frozenset("e"), frozenset("ab"))
    phases = {number: advance(what, Aggregating(number, 1, frozenset("a")), done)[0] for number in range(6)}
    awaited = {number: phase.awaited for number, phase in phases.items() if isinstance(phase, Evaluating)}
    assert [number for number, who in awaited.items() if "e" in who] == [2, 4, 5]
    assert [number for number, who in awaited.items() if "a" in who] == trainers
    assert all(("a" in who) == ("b" in who) for who in awaited.values())


def test_without_scorers_the_run_goes_on_unscored() -> None:
    nobody = Aggregated(1.0, NOBODY)
    assert advance(rules(), Aggregating(1, 1, frozenset("a")), nobody) == (Idle(2), [])
    phase, _ = advance(rules(), Aggregating(ROUNDS, 1, frozenset("a")), nobody)
    assert phase == FinishedPhase("completed", RoundOutcome.COMPLETED)


def test_the_next_round_waits_for_all_scores() -> None:
    evaluating = Evaluating(1, frozenset("ab"), 0.0)
    phase, effects = advance(rules(), evaluating, ScoresArrived("b"))
    assert (phase, effects) == (replace(evaluating, awaited=frozenset("a")), [])
    assert advance(rules(), phase, ScoresArrived("b")) == (phase, [])
    for done in (ScoresArrived("a"), Declined("a", 1.0)):
        assert advance(rules(), phase, done) == (Idle(2), [])
    end = FinishedPhase("completed", RoundOutcome.COMPLETED)
    assert advance(rules(), replace(evaluating, round=ROUNDS, awaited=frozenset("a")), ScoresArrived("a")) == (
        end,
        [Finish(end)],
    )


def test_the_next_round_waits_for_scores_until_their_deadline_and_not_for_dead_scorers() -> None:
    evaluating = Evaluating(1, frozenset("a"), 10.0)
    assert advance(rules(), evaluating, tick(109.9)) == (evaluating, [])
    assert advance(rules(), evaluating, tick(110.0)) == (Idle(2), [])
    evaluating = Evaluating(1, frozenset("ae"), 0.0)
    assert advance(rules(), evaluating, tick(1.0, trainers="b", evaluators="e")) == (evaluating, [])
    assert advance(rules(), evaluating, tick(1.0, trainers="b")) == (Idle(2), [])


SITES = ("ann", "bob", "cyd")
VALUES = {"ann": 1.0, "bob": 2.0, "cyd": 6.0}

# Every phase


def test_collecting_goes_on_with_the_same_cohort_nonces_and_reports(lab: Lab) -> None:
    task_ids = {site: lab.task(site).task_id for site in SITES}
    lab.push("ann", lab.model(1.0))
    before = lab.phase
    lab.restart()
    assert lab.phase == before
    assert lab.asked("ann") is None
    assert {site: lab.task(site).task_id for site in ("bob", "cyd")} == {
        site: task_ids[site] for site in ("bob", "cyd")
    }
    lab.round(bob=2.0, cyd=6.0)
    assert lab.value == 3.0


def test_a_deadline_begins_again_and_the_sites_of_before_count_as_alive(lab: Lab) -> None:
    lab.push("ann", lab.model(1.0))
    lab.push("bob", lab.model(3.0))
    lab.clock.now, lab.here = 7000.0, {}  # the new process's clock; nobody has enrolled yet
    lab.restart()
    lab.later(49.0)
    assert isinstance(lab.phase, phases.Collecting)
    lab.later(2.0)  # cyd was not heard of for longer than stall_timeout_s
    assert lab.value == 2.0


def test_a_failed_site_stays_failed(lab: Lab) -> None:
    lab.beat("ann", lab.task("ann").task_id, failure=FailureReason.DATA)
    before = lab.phase
    lab.restart()
    assert lab.phase == before
    assert lab.asked("ann") is None


def test_an_abandoned_attempt_is_followed_by_the_next_one_and_a_failed_run_by_none(lab: Lab) -> None:
    lab.later(100.0, alive=SITES)
    lab.restart()
    assert lab.phase == phases.Idle(1, tries=1)
    lab.run.handle(phases.Broken("disk"))
    lab.here = {}
    lab.restart()
    assert lab.run.phase == phases.FinishedPhase("disk", RoundOutcome.FAILED)
    with pytest.raises(NotEnrolledError):  # presumed sites are not answered before
        lab.task("ann")


def test_a_complete_round_that_was_not_aggregated_is_aggregated(make: MakeLab, workshop: Later) -> None:
    reference = make().begin()
    lab = make(blobs=reference.blobs, ledger=reference.ledger, work=workshop)
    lab.here = reference.here
    lab.restart()
    for site in SITES:
        lab.push(site, lab.model(VALUES[site]))
    assert isinstance(lab.phase, phases.Aggregating)
    workshop.jobs.clear()  # the process dies in the middle of it
    lab.restart()
    assert isinstance(lab.phase, phases.Collecting)
    assert [lab.asked(site) for site in SITES] == [None, None, None]
    lab.later(0.0)
    workshop.finish()
    assert lab.value == 3.0


def test_evaluating_waits_only_for_the_scores_that_are_missing(lab: Lab) -> None:
    for site in SITES:
        lab.push(site, lab.model(VALUES[site]))
    lab.score("ann")
    lab.score("eva")
    lab.restart()
    assert isinstance(lab.phase, phases.Evaluating)
    assert lab.phase.awaited == {"bob", "cyd"}
    assert lab.asked("ann") is None
    lab.score("bob")
    lab.score("cyd")
    assert lab.asked("ann") is TaskKind.FIT


def test_scores_that_were_not_reported_in_time_are_not_waited_for_again(lab: Lab) -> None:
    for site in SITES:
        lab.push(site, lab.model(VALUES[site]))
    for site in SITES:
        lab.score(site)
    lab.later(100.0, alive=("eva",))  # eva lives but does not score, and there are no trainers for a second round
    assert lab.phase == phases.Idle(2, since=100.0)
    lab.restart()
    lab.later(0.0)
    assert isinstance(lab.phase, phases.Collecting)
    assert lab.phase.round == 2


def test_a_run_between_two_rounds_goes_on_with_the_second(make: MakeLab, workshop: Later) -> None:
    lab = make(federation={"score_every": 0}, work=workshop)
    lab.gather()
    lab.first_models()
    workshop.finish()
    for site in SITES:
        lab.push(site, lab.model(VALUES[site]))
    lab.clock.now += 60.0  # nobody is alive any more when the round is published
    workshop.finish()
    assert lab.phase == phases.Idle(2, since=60.0)
    lab.restart()
    lab.later(0.0)
    assert lab.task("ann").round == 2
    assert len(lab.ledger.rounds("test")) == 3


def test_a_finished_run_stays_finished(lab: Lab) -> None:
    lab.round(**VALUES)
    lab.round(**VALUES)
    before = lab.address
    lab.restart()
    assert lab.phase == phases.FinishedPhase("completed", RoundOutcome.COMPLETED)
    assert lab.address == before
    lab.later(1000.0)
    assert lab.intake.next_task("ann", "daemon-ann") == Finished("completed", last=True)


def test_another_recipe_under_the_same_name_is_refused(make: MakeLab, lab: Lab) -> None:
    with pytest.raises(StateError, match="another recipe"):
        make(blobs=lab.blobs, ledger=lab.ledger, plan={"lr": 0.5})


def test_a_state_that_is_gone_is_said_at_once(lab: Lab) -> None:
    lab.blobs.discard(lab.address)
    with pytest.raises(StateError, match=lab.address):
        lab.restart()


# Every write


def drive(lab: Lab, unanswered: dict[str, tuple[Task, float]]) -> Lab:
    """Honest sites ask, work, and repeat what was not answered, until the run has ended."""
    for _ in range(60):
        if isinstance(lab.phase, phases.FinishedPhase):
            return lab
        for site in ("eva", *SITES):
            lab.run.tick()
            work(lab, site, unanswered)
    raise AssertionError(f"still {lab.phase}")


def work(lab: Lab, site: str, unanswered: dict[str, tuple[Task, float]]) -> None:
    if site in unanswered:
        task, value = unanswered[site]
        assert lab.push(site, lab.model(value), task).verdict in (Verdict.ACCEPTED, Verdict.DUPLICATE)
        del unanswered[site]
    answer = lab.intake.next_task(site, f"daemon-{site}")
    if isinstance(answer, Task) and answer.kind is TaskKind.SCORE:
        lab.score(site, answer.round / 4, answer)
    elif isinstance(answer, Task):
        by = VALUES.get(site, 4.0)  # of an evaluator that refines
        value = by * (answer.round + 1) if answer.round else 0.0  # all sites make the same first model
        unanswered[site] = answer, value
        assert lab.push(site, lab.model(value), answer).verdict is Verdict.ACCEPTED
        del unanswered[site]


def wherever_killed(make: MakeLab, fragile: Fragile, durably: bool, **tables: Any) -> tuple[Lab, list[Lab]]:
    """A run that nothing disturbs, and its like for each of its writes: there the server dies, and another goes on.

    What is durable at each write, and what sites then lack an answer to, is copied out of the one run.
    """
    unanswered: dict[str, tuple[Task, float]] = {}
    left: list[tuple[Ledger, Blobs, dict[str, tuple[Task, float]]]] = []
    reference = enrolled(make(ledger=fragile, **tables))
    fragile.durably = durably
    fragile.watched = lambda: left.append((fragile.copy(), deepcopy(reference.blobs), dict(unanswered)))
    drive(reference, unanswered)
    fragile.watched = lambda: None
    return reference, [
        drive(enrolled(make(ledger=ledger, blobs=blobs, **tables)), lacking) for ledger, blobs, lacking in left
    ]


def enrolled(lab: Lab) -> Lab:
    lab.enroll("eva", role=Role.EVALUATOR)
    lab.enroll(*SITES)
    return lab


def accepted(lab: Lab) -> list[tuple[int, int, str]]:
    rows = [row for number in range(9) for row in lab.ledger.updates("test", number)]
    return [(row.task.round, row.task.attempt, row.task.site) for row in rows if row.verdict is Verdict.ACCEPTED]


@pytest.mark.parametrize("durably", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("method", "writes"), [("fedavg", 20), ("fedic", 26)])  # whose models are refined
def test_a_server_killed_at_any_of_its_writes_ends_with_the_same_bytes(
    make: MakeLab, fragile: Fragile, durably: bool, method: str, writes: int
) -> None:
    reference, labs = wherever_killed(make, fragile, durably, method={"name": method})
    assert reference.phase == phases.FinishedPhase("completed", RoundOutcome.COMPLETED)
    assert reference.value == (12.0 if method == "fedic" else 9.0)
    assert len(labs) > writes
    aggregates = [row.aggregate for row in reference.ledger.rounds("test")]
    for lab in labs:
        assert (lab.phase, lab.address) == (reference.phase, reference.address)
        assert accepted(lab) == accepted(reference)
        assert lab.ledger.scores("test") == reference.ledger.scores("test")
        assert [row.aggregate for row in lab.ledger.rounds("test")] == aggregates


@pytest.mark.parametrize("durably", [False, True], ids=["before", "after"])
def test_a_run_that_stops_early_does_so_after_the_same_round_wherever_its_server_is_killed(
    make: MakeLab, fragile: Fragile, durably: bool
) -> None:
    # Scores rise by 0.25 a round: rounds 2 and 3 are better than round 1, and not by 0.6.
    impatient: dict[str, Any] = {"rounds": 6, "federation": {"patience": 2, "min_improvement": 0.6}}
    reference, labs = wherever_killed(make, fragile, durably, **impatient)
    reason = "stopped early after round 3: global.accuracy no better by 0.6 since round 1"
    assert reference.phase == phases.FinishedPhase(reason, RoundOutcome.COMPLETED)
    assert len(labs) > 20
    for lab in labs:
        assert (lab.phase, lab.address) == (reference.phase, reference.address)
        assert [row.round for row in lab.ledger.rounds("test") if row.state] == [0, 1, 2, 3]
