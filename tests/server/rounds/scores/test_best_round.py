"""The best round: which one it is, that its state stays, and that a run without progress ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from protofed.common.config.recipe import Federation
from protofed.common.errors import ConfigError
from protofed.common.protocol.messages import TaskKind
from protofed.server.operator.verification import VerificationResult, verify_round
from protofed.server.rounds.aggregation import aggregation
from protofed.server.rounds.machine import phases
from protofed.server.rounds.machine.advance import advance
from protofed.server.rounds.machine.phases import Plateau
from protofed.server.rounds.machine.rules import RoundRules
from protofed.server.rounds.scores import best_round
from protofed.server.rounds.scores.best_round import (
    BestRound,
    JudgedRounds,
    Scores,
    best_kept,
    compute_means,
    judged_rounds,
)
from protofed.server.verdicts import RoundOutcome

if TYPE_CHECKING:
    from tests.server.conftest import Lab, MakeLab

SITES = ("ann", "bob", "cyd")


def go(lab: Lab, values: Sequence[float]) -> Lab:
    """Complete a round for each value: all its scores are that value, and no two rounds publish the same state."""
    for value in values:
        if isinstance(lab.phase, phases.FinishedPhase):
            break
        weights = 1.0 + lab.phase.round if isinstance(lab.phase, phases.Collecting) else 0.0
        offset = 64.0 * lab.ledger.newest_attempt(lab.run.name, int(weights) - 1)
        for site, more in zip(SITES, (0.0, 0.25, 0.625), strict=True):  # nobody's update is the mean
            lab.push(site, lab.model(weights + offset + more))
        for site in ("eva", *SITES):
            if lab.asked(site) is TaskKind.SCORE:
                lab.score(site, value)
    return lab


def kept(lab: Lab) -> list[int]:
    """Rounds whose state is kept."""
    return [row.round for row in lab.ledger.rounds(lab.run.name) if row.state and lab.has(row.state)]


def best(lab: Lab) -> BestRound | None:
    return best_kept(lab.ledger, lab.blobs, lab.run.name)


def judged(scores: Mapping[int, Scores], best_by: str | None) -> JudgedRounds | None:
    return best_round.judged(lambda name: compute_means(scores, {}, name), best_by)


# Which round


def test_the_first_of_the_scores_that_a_run_has_judges_it() -> None:
    table = {
        1: {"ann": {"personal.pm_v": 0.5}, "bob": {"personal.pm_v": 0.75}},
        2: {"ann": {"personal.pm_v": 1.0, "personal.accuracy": 0.0}, "bob": {"personal.pm_v": 0.5}},
        3: {"ann": {"personal.pm_v": 0.75}, "bob": {"personal.pm_v": 0.75}, "eva": {"loss": 9.0}},
    }
    found = judged(table, None)
    assert found is not None
    assert found.ranked[0] == BestRound(2, "personal.pm_v", 0.75)  # round 3 is as good, and later
    assert found.means == {1: 0.625, 2: 0.75, 3: 0.75}
    assert judged({1: {"ann": {"loss": 1.0}}}, None) is None
    balanced = {
        n: {"eva": {"global.accuracy": a, "global.balanced_accuracy": b}} for n, a, b in ((1, 0.5, 0.5), (2, 0.9, 0.25))
    }
    found = judged(balanced, None)
    assert found is not None
    assert (found.ranked[0].round, found.score) == (1, "global.balanced_accuracy")


def test_a_chosen_score_judges_alone() -> None:
    table = {1: {"eva": {"global.accuracy": 0.5}}, 2: {"ann": {"personal.accuracy": 0.25}}}
    found = judged(table, "personal.accuracy")
    assert found is not None
    assert found.means == {2: 0.25}
    assert judged(table, "global.recall.1") is None


@pytest.mark.parametrize(
    ("values", "min_improvement", "expected"),
    [
        ([0.5], 0.0, (1, 0)),
        ([0.5, 0.6, 0.7], 0.0, (3, 0)),
        ([0.5, 0.5, 0.5], 0.0, (1, 2)),  # as good is not better
        ([0.5, 0.7, 0.6, 0.7], 0.0, (2, 2)),
        ([0.2, 0.3], 0.1, (2, 0)),  # 0.3 - 0.2 is a little less than 0.1
        ([0.2, 0.25, 0.3], 0.1, (3, 0)),  # small steps add up
        ([0.5, 0.55, 0.59], 0.1, (1, 2)),
    ],
)
def test_a_plateau_counts_rounds_since_the_last_improvement(
    values: Sequence[float], min_improvement: float, expected: tuple[int, int]
) -> None:
    rounds = JudgedRounds("global.accuracy", dict(enumerate(values, 1)))
    assert rounds.plateau(min_improvement) == Plateau("global.accuracy", *expected)


def test_rounds_without_the_score_do_not_count() -> None:
    assert JudgedRounds("x", {2: 0.5, 10: 0.5, 20: 0.25}).plateau(0.0) == Plateau("x", 2, 2)


# What is kept


GOES = [0.1, 0.8, 0.5, 0.5, 0.5, 0.5, 0.9]


@pytest.mark.parametrize(
    ("values", "expected", "states"),
    [
        ([0.1, 0.9, 0.5, 0.5, 0.5, 0.5], BestRound(2, "global.accuracy", 0.9), [1, 2, 4, 5, 6]),  # 1 made 2, and 4 5
        ([0.5] * 6, BestRound(1, "global.accuracy", 0.5), [0, 1, 4, 5, 6]),  # of equals the earlier one
        ([*GOES, 0.5, 0.5, 0.5, 0.5], BestRound(7, "global.accuracy", 0.9), [6, 7, 9, 10, 11]),
        ([], None, [4, 5, 6]),
    ],
)
def test_the_best_round_stays_when_others_go(
    make: MakeLab, values: list[float], expected: BestRound | None, states: list[int]
) -> None:
    lab = make(rounds=12, keep_rounds=1, federation={} if values else {"score_every": 0}).begin()
    go(lab, values or [0.0] * 6)
    assert (best(lab), kept(lab)) == (expected, states)
    updates = {row.task.round for row in lab.ledger.updates("test", range(1, 12)) if lab.has(row.digest)}
    assert updates == {*states} - {min(states), *([states[-3]] if expected else [])}
    if expected is not None:
        assert verify_round(lab.ledger, lab.blobs, "test", expected.round, 1).finding is VerificationResult.SAME


@pytest.mark.parametrize("pruned", [True, False])
def test_a_former_best_round_goes_after_a_restart_too_also_where_the_server_died_before_it_had_pruned(
    make: MakeLab, monkeypatch: pytest.MonkeyPatch, pruned: bool
) -> None:
    lab = go(make(rounds=12, keep_rounds=1).begin(), GOES)
    with monkeypatch.context() as patched:
        if not pruned:
            patched.setattr(aggregation, "prune", lambda *_: None)
        go(lab, [0.5])
    assert (2 in kept(lab)) is not pruned
    lab.restart()
    go(lab, [0.5] * 3)
    assert kept(lab) == [6, 7, 9, 10, 11]


def test_the_recipe_chooses_the_score(make: MakeLab) -> None:
    lab = make(rounds=9, keep_rounds=1, federation={"best_by": "personal.accuracy"}).begin()
    for common, own in ((0.9, 0.1), (0.5, 0.8), (0.5, 0.2), (0.5, 0.2), (0.5, 0.2)):
        for site in SITES:
            lab.push(site, lab.model(common + own))
        lab.score("eva", common)
        for site in SITES:
            lab.score(site, own)
    assert (found := best(lab)) is not None
    assert (found.round, found.score) == (2, "personal.accuracy")
    assert 2 in kept(lab)


def test_a_run_goes_back_to_its_best_round(make: MakeLab) -> None:
    lab = go(make(rounds=9, keep_rounds=1).begin(), [0.1, 0.9, 0.5, 0.5, 0.5, 0.5])
    state = lab.ledger.rounds("test")[2].state
    lab.run.roll_back(2)
    assert (lab.address, best(lab)) == (state, BestRound(2, "global.accuracy", 0.9))
    lab.later(0.0)
    go(lab, [0.5] * 5)
    assert 2 in kept(lab)


def test_a_round_that_was_rolled_back_is_never_the_best(make: MakeLab) -> None:
    lab = go(make(rounds=9, keep_rounds=3).begin(), [0.1, 0.5, 0.9])
    assert best(lab) == BestRound(3, "global.accuracy", 0.9)
    lab.run.roll_back(2)
    assert best(lab) == BestRound(2, "global.accuracy", 0.5)
    lab.later(0.0)
    go(lab, [0.25])
    assert best(lab) == BestRound(2, "global.accuracy", 0.5)


def test_if_a_better_round_is_gone_the_best_of_those_that_are_kept_stays(make: MakeLab) -> None:
    lab = go(make(rounds=12, keep_rounds=1).begin(), [0.1, 0.8, 0.5, 0.5, 0.5, 0.6, 0.9, 0.5])
    lab.run.roll_back(6)  # round 2 went when round 7 was better, and round 7 is rolled back now
    lab.later(0.0)
    go(lab, [0.5] * 5)
    every = judged_rounds(lab.ledger, "test")
    assert every is not None
    assert every.ranked[0].round == 2
    assert best(lab) == BestRound(6, "global.accuracy", 0.6)


def test_the_best_round_of_another_run_stays_though_its_bytes_are_those_of_an_old_one_here(make: MakeLab) -> None:
    here = go(make("here", rounds=2, keep_rounds=1).begin(), [0.9, 0.1])
    there = make("there", rounds=9, keep_rounds=1, ledger=here.ledger, blobs=here.blobs).begin()
    go(there, [0.1, 0.9, 0.5, 0.5, 0.5, 0.5])
    assert there.ledger.rounds("there")[1].state == here.ledger.rounds("here")[1].state
    assert best(here) == BestRound(1, "global.accuracy", 0.9)


def test_a_score_that_comes_too_late_changes_nothing(make: MakeLab) -> None:
    lab = make(rounds=9, keep_rounds=1).begin()
    for site in SITES:
        lab.push(site, lab.model(1.0))
    late = lab.task("eva")
    for site in SITES:
        lab.score(site, 0.25)
    lab.later(100.0, alive=("eva", *SITES))
    lab.score("eva", 1.0, late)
    found = judged_rounds(lab.ledger, "test")
    assert found is not None
    assert (found.score, found.means) == ("personal.accuracy", {1: 0.25})


@pytest.mark.parametrize("method", ["solo", "cwfedavg"])
def test_a_score_of_a_global_model_that_a_method_has_not_is_refused(make: MakeLab, method: str) -> None:
    with pytest.raises(ConfigError, match=r"best_by = 'global\.accuracy'.*no global model"):
        make(method={"name": method}, federation={"best_by": "global.accuracy"})


# Early end


def rules(patience: int | None = None, **federation: Any) -> RoundRules:
    federation |= {"patience": patience, "min_sites": 1, "quorum": 1}
    return RoundRules(9, Federation(**federation), lambda _round, sites, size: frozenset(sites[:size]))


def tick(plateau: Plateau | None, **fields: Any) -> phases.Tick:
    here = frozenset("ab")
    return phases.Tick(1.0, here, here, phases.NOBODY, plateau=plateau, **fields)


@pytest.mark.parametrize("paused", [False, True])
def test_a_run_ends_once_its_patience_is_over(paused: bool) -> None:
    over = Plateau("global.accuracy", 4, 3)
    phase, effects = advance(rules(patience=3), phases.Idle(8), tick(over, paused=paused))
    reason = "stopped early after round 7: global.accuracy no better since round 4"
    assert phase == phases.FinishedPhase(reason, RoundOutcome.COMPLETED)
    assert effects == [phases.Finish(phase)]


@pytest.mark.parametrize(("patience", "plateau"), [(4, Plateau("x", 4, 3)), (None, Plateau("x", 4, 3)), (3, None)])
def test_a_run_goes_on_while_it_has_patience(patience: int | None, plateau: Plateau | None) -> None:
    phase, _ = advance(rules(patience), phases.Idle(8), tick(plateau))
    assert isinstance(phase, phases.Collecting)


def test_a_run_that_stops_early_keeps_its_best_round_and_can_go_on_from_it(make: MakeLab) -> None:
    lab = go(make(rounds=9, keep_rounds=1, federation={"patience": 2}).begin(), [0.1, 0.9, 0.5, 0.5, 0.5])
    reason = "stopped early after round 4: global.accuracy no better since round 2"
    assert lab.phase == phases.FinishedPhase(reason, RoundOutcome.COMPLETED)
    row = lab.ledger.run("test")
    assert row is not None
    assert (row.reason, row.outcome, row.failed) == (reason, RoundOutcome.COMPLETED, False)
    assert best(lab) == BestRound(2, "global.accuracy", 0.9)
    with pytest.raises(ConfigError, match="would end again at once"):
        lab.run.roll_back(4)
    lab.run.roll_back(2)
    lab.later(0.0)
    assert lab.task("ann").round == 3


def test_the_last_round_completes_a_run_whatever_its_patience(make: MakeLab) -> None:
    lab = go(make(rounds=3, federation={"patience": 2}).begin(), [0.9, 0.5, 0.5])
    assert lab.phase == phases.FinishedPhase("completed", RoundOutcome.COMPLETED)
