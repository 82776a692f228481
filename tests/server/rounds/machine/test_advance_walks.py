"""The round machine under random events: whatever happens, rounds go forward, are folded once, and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.common.config.recipe import Federation
from protofed.common.payload import SiteId
from protofed.server.rounds.machine.advance import advance
from protofed.server.rounds.machine.phases import (
    Abandon,
    Aggregate,
    Aggregated,
    Aggregating,
    Arrived,
    AskRefinement,
    AskScores,
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
    Sites,
    Tick,
)
from protofed.server.rounds.machine.rules import RoundRules
from protofed.server.verdicts import RoundOutcome

DEADLINE = 100.0


def first(round: int, available: Sequence[SiteId], size: int) -> frozenset[SiteId]:
    return frozenset(available[:size])


NAMES = "abcdez"
some = st.frozensets(st.sampled_from(NAMES[:5]))
one = st.sampled_from(NAMES)


@st.composite
def any_rules(draw: st.DrawFn) -> RoundRules:
    federation = Federation(
        deadline_s=DEADLINE,
        score_deadline_s=DEADLINE,
        min_sites=draw(st.integers(1, 4)),
        participation=draw(st.sampled_from([0.1, 0.5, 1.0])),
        over_selection=draw(st.sampled_from([1.0, 1.5, 3.0])),
        quorum=draw(st.sampled_from([1, 2, 3, 0.01, 0.5, 1.0])),
        grace=draw(st.sampled_from([0.0, 0.5, 1.0])),
        max_attempts=draw(st.integers(1, 3)),
        score_every=draw(st.integers(0, 2)),
    )
    return RoundRules(draw(st.integers(1, 3)), federation, first, refined=draw(st.booleans()))


@st.composite
def any_event(draw: st.DrawFn) -> Event:
    """An event whose time is 0; the walk sets it."""
    kind = draw(
        st.sampled_from(
            ["tick", "tick", "arrived", "arrived", "arrived", "declined", "aggregated", "insufficient", "scored"]
        )
    )
    match kind:
        case "tick":
            trainers = draw(some)
            return Tick(0.0, trainers | draw(some), trainers, draw(st.frozensets(st.just("e"))))
        case "arrived":
            return Arrived(draw(one), 0.0)
        case "declined":
            return Declined(draw(one), 0.0)
        case "aggregated":
            return Aggregated(0.0, draw(some))
        case "insufficient":
            return Insufficient("rejected", 0.0)
        case _:
            return ScoresArrived(draw(one))


@dataclass
class Walk:
    """A machine on its way, watched at every step."""

    rules: RoundRules
    phase: Phase = field(default_factory=lambda: Idle(0))
    now: float = 0.0
    round: int = 0
    opened: dict[tuple[int, int], Collecting] = field(default_factory=dict)
    came: dict[tuple[int, int], set[SiteId]] = field(default_factory=dict)
    folded: set[int] = field(default_factory=set)
    published: set[int] = field(default_factory=set)
    asked: Sites = frozenset()  # to refine the open round
    ends: int = 0

    def step(self, event: Event, seconds: float = 0.0) -> None:
        self.now += seconds
        if isinstance(event, Tick | Arrived | Declined | Aggregated | Insufficient):
            event = replace(event, now=self.now)
        if isinstance(event, Tick) and isinstance(self.phase, Idle):
            event = replace(event, attempt=1 + sum(number == self.phase.round for number, _ in self.opened))
        if isinstance(event, Aggregated) and isinstance(self.phase, Aggregating):
            self.folded.add(self.phase.round)
            self.published |= set() if self.phase.to_refine else {self.phase.round}
        if isinstance(event, Arrived) and isinstance(self.phase, Collecting):
            self.came[self.phase.round, self.phase.attempt].add(event.site)
        before = self.phase
        self.phase, effects = advance(self.rules, before, event)
        if isinstance(before, Refining):
            assert isinstance(self.phase, FinishedPhase) or self.phase.round == before.round, "no round is given up"
        for effect in effects:
            self._watch(effect)
        assert isinstance(self.phase, FinishedPhase) or self.phase.round >= self.round, "rounds never go back"
        self.round = getattr(self.phase, "round", self.round)

    def _watch(self, effect: Effect) -> None:
        match effect:
            case Open(phase):
                key = (phase.round, phase.attempt)
                assert key not in self.opened, "an attempt is opened once"
                assert phase.quorum <= len(phase.cohort), "a cohort can reach its quorum"
                self.opened[key], self.came[key] = phase, set()
            case Aggregate(phase, _):
                opened = self.opened[phase.round, phase.attempt]
                assert phase.round not in self.folded, "a round is folded once"
                assert len(phase.sites) >= opened.quorum
                assert phase.sites <= opened.cohort
                assert phase.sites <= self.came[phase.round, phase.attempt]
            case Abandon(round, attempt, _):
                assert round not in self.folded, "what was folded is not abandoned"
                assert attempt <= self.rules.federation.max_attempts
            case AskRefinement(phase):
                assert self.rules.refined
                assert phase.round in self.folded - self.published, "an aggregate is refined, and no published state"
                assert len(phase.requested) == 1, "one evaluator at a time"
                self.asked = phase.requested
            case Recall():
                assert self.asked, "nobody is recalled who was not asked"
            case Refine(phase):
                assert phase.round in self.folded - self.published
                assert phase.sites == self.asked
            case AskScores(phase):
                assert phase.round in self.published
            case Finish(phase):
                self.ends += 1
                assert phase.failed or self.published == set(range(self.rules.rounds + 1)), "no round is left out"

    def to_the_end(self, who: Sites) -> None:
        """Let time pass, with everyone there and nobody answering, until the run ends."""
        limit = (self.rules.rounds + 2) * (4 * self.rules.federation.max_attempts + 3)
        for _ in range(limit):
            if isinstance(self.phase, Aggregating):
                self.step(Aggregated(0.0, who))
            self.step(Tick(0.0, who, who, frozenset("e")), seconds=DEADLINE + 1)
        assert isinstance(self.phase, FinishedPhase), f"still {self.phase}"


steps = st.lists(st.tuples(any_event(), st.sampled_from([0.0, 1.0, 30.0, 60.0, 120.0])), max_size=60)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(any_rules(), steps)
def test_whatever_happens_rounds_go_forward_are_folded_once_and_end(what: RoundRules, events: Any) -> None:
    machine = Walk(what)
    for event, seconds in events:
        machine.step(event, seconds)
    machine.to_the_end(frozenset("abcd"))
    assert machine.ends == 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(any_rules(), st.randoms(use_true_random=False))
def test_a_run_whose_sites_all_answer_completes_in_whatever_order(what: RoundRules, random: Any) -> None:
    machine, who, evaluators = Walk(what), frozenset("abcd"), frozenset("ez")
    while not isinstance(machine.phase, FinishedPhase):
        match machine.phase:
            case Idle():
                machine.step(Tick(0.0, who, who, evaluators))
            case Collecting(awaited=awaited):
                machine.step(Arrived(random.choice(sorted(awaited)), 0.0))
            case Aggregating():
                machine.step(Aggregated(0.0, who))
            case Refining(requested=asked):
                machine.step(Arrived(random.choice(sorted(asked)), 0.0) if asked else Tick(0.0, who, who, evaluators))
            case Evaluating(awaited=awaited):
                machine.step(ScoresArrived(random.choice(sorted(awaited))))
    assert machine.phase == FinishedPhase("completed", RoundOutcome.COMPLETED)
    assert all(attempt == 1 for _, attempt in machine.opened)
