"""A run that goes back: state, attempts, verdicts and scores are those of the round it went back to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from protofed.common.errors import ConfigError, ConflictError
from protofed.common.protocol.messages import Signal, TaskKind, Verdict
from protofed.server.rounds.machine import phases
from protofed.server.verdicts import RoundOutcome

if TYPE_CHECKING:
    from tests.server.conftest import Lab, Later, MakeLab

SITES = ("ann", "bob", "cyd")


@pytest.fixture
def far(make: MakeLab) -> Lab:
    """Rounds 1 to 3 of 6 are published, with values 1, 2 and 3; round 4 is open."""
    lab = make(rounds=6, keep_rounds=3).begin()
    for value in (1.0, 2.0, 3.0):
        lab.round(ann=value, bob=value, cyd=value)
    return lab


def test_the_state_of_that_round_is_what_sites_start_from_again_also_after_a_restart(far: Lab) -> None:
    late, state = far.task("ann"), far.ledger.rounds("test")[1].state
    far.run.roll_back(1)
    history = far.ledger.rounds("test", rolled_back=True)
    assert [(row.round, row.rolled_back) for row in history] == [
        *((n, False) for n in (0, 1)),
        *((n, True) for n in (2, 3, 4)),
    ]
    told = {(task.task_status, task.reason) for task in far.ledger.tasks("test", 4)}
    assert told == {("late", "rolled back to round 1")}
    assert far.beat("ann", late.task_id) is Signal.ABORT  # a site that trains is called off
    assert far.push("ann", far.model(9.0), late).verdict is Verdict.LATE
    far.restart()
    assert far.value == 1.0
    far.later(0.0)
    assert (far.task("ann").round, far.address) == (2, state)
    far.restart()
    assert isinstance(far.phase, phases.Collecting)
    assert (far.phase.round, far.phase.attempt) == (2, 2)
    far.round(ann=5.0, bob=5.0, cyd=5.0)
    attempts = [(row.round, row.attempt) for row in far.ledger.rounds("test")]
    assert attempts == [(0, 1), (1, 1), (2, 2), (3, 2)]


def test_an_update_that_counted_before_is_still_a_duplicate(far: Lab) -> None:
    far.run.roll_back(3)
    far.later(0.0)
    task, payload = far.task("ann"), far.model(7.0)
    assert far.push("ann", payload, task).verdict is Verdict.ACCEPTED
    far.run.roll_back(2)
    assert far.push("ann", payload, task).verdict is Verdict.DUPLICATE


def test_scores_of_rounds_that_were_rolled_back_are_not_told_and_do_not_stand_in_the_way(far: Lab) -> None:
    assert sorted(far.ledger.scores("test")) == [1, 2, 3]
    far.run.roll_back(1)
    assert sorted(far.ledger.scores("test")) == [1]
    far.later(0.0)
    far.round(ann=5.0, bob=5.0, cyd=5.0)
    assert sorted(far.ledger.scores("test")) == [1, 2]


def test_a_site_that_comes_after_it_is_asked_for_its_scores_once_it_has_trained(far: Lab) -> None:
    far.run.roll_back(1)
    far.enroll("dan")
    far.later(0.0)
    for site in (*SITES, "dan"):
        far.push(site, far.model(5.0))
    assert {site for site in far.here if far.asked(site) is TaskKind.SCORE} == {*SITES, "dan", "eva"}


def test_abandoned_attempts_of_before_do_not_count_against_the_round(make: MakeLab) -> None:
    lab = make(federation={"max_attempts": 2}).begin()
    lab.push("ann", lab.model(1.0))  # which does not stand
    lab.later(100.0, alive=SITES)
    lab.later(0.0)
    assert isinstance(lab.phase, phases.Collecting)
    assert lab.phase.tries == 1
    lab.run.roll_back(0)
    lab.later(0.0)
    assert (lab.phase.attempt, lab.phase.tries) == (3, 0)
    assert lab.task("ann").state_round == 0
    lab.restart()
    assert isinstance(lab.phase, phases.Collecting)
    assert lab.phase.tries == 0


@pytest.mark.parametrize("to", [4, 99])
def test_a_round_without_a_state_is_refused_with_those_that_have_one(far: Lab, to: int) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; expected one of 0, 1, 2, 3"):
        far.run.roll_back(to)
    assert far.value == 3.0


def test_a_state_that_was_discarded_is_refused_and_nothing_changes(make: MakeLab) -> None:
    lab = make(rounds=9, keep_rounds=1).begin()  # round 1 stays: all score alike, and the first of equals is the best
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        lab.round(ann=value, bob=value, cyd=value)
    with pytest.raises(ConfigError, match="keep_rounds"):
        lab.run.roll_back(2)
    assert lab.asked("ann") is TaskKind.FIT


@pytest.mark.parametrize("ended", [True, False])
def test_the_last_round_is_refused_since_none_would_follow_it(make: MakeLab, *, ended: bool) -> None:
    lab = make().begin()
    lab.round(ann=1.0, bob=1.0, cyd=1.0)
    lab.train(2.0)
    if ended:
        lab.later(100.0)  # no score comes
        assert isinstance(lab.phase, phases.FinishedPhase)
    before = lab.phase
    with pytest.raises(ConfigError, match="round 2 is the last"):
        lab.run.roll_back(2)
    assert lab.phase == before
    row = lab.ledger.run("test")
    assert row is not None
    assert row.outcome is (RoundOutcome.COMPLETED if ended else None)
    lab.run.roll_back(1)
    assert lab.phase == phases.Idle(2)
    row = lab.ledger.run("test")
    assert row is not None
    assert (row.outcome, row.ended_at, row.reason) == (None, None, None)


def test_a_round_that_is_being_aggregated_is_waited_for(make: MakeLab, workshop: Later) -> None:
    lab = make(work=workshop)
    lab.gather()
    lab.first_models()
    with pytest.raises(ConflictError, match="try again"):
        lab.run.roll_back(0)
    workshop.finish()
    lab.run.roll_back(0)
    assert lab.phase == phases.Idle(1)


def test_a_fit_says_which_update_of_the_site_stands(far: Lab) -> None:
    """What it keeps of later rounds does not go with the state that it starts from."""
    assert far.task("ann").state_round == 3
    far.run.roll_back(1)
    far.later(0.0)
    assert far.task("ann").state_round == 1
    far.restart()
    assert far.task("ann").state_round == 1
    assert far.ledger.standing_rounds("test") == {"ann": 1, "bob": 1, "cyd": 1}
    far.round(ann=5.0, bob=5.0, cyd=5.0)
    assert far.task("ann").state_round == 2
