"""A server that is killed goes on where the ledger says: nothing counts twice, nothing is lost, no bit differs."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from protofed.common.errors import FailureReason, NotEnrolledError, StateError
from protofed.common.protocol.messages import Finished, Role, Task, TaskKind, Verdict
from protofed.server.rounds.machine import phases
from protofed.server.storage.blobs import Blobs, FolderBlobs
from protofed.server.storage.ledger import Ledger
from protofed.server.verdicts import RoundOutcome

if TYPE_CHECKING:
    from tests.server.conftest import Fragile, Lab, Later, MakeLab

SITES = ("ann", "bob", "cyd")
VALUES = {"ann": 1.0, "bob": 2.0, "cyd": 6.0}

# Every phase


def test_idle_goes_on_idle(make: MakeLab) -> None:
    lab = make()
    lab.restart()
    assert lab.phase == phases.Idle(0)
    lab.begin()
    assert isinstance(lab.phase, phases.Collecting)


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


def test_presumed_sites_have_to_enroll_before_they_are_answered(lab: Lab) -> None:
    lab.here = {}
    lab.restart()
    with pytest.raises(NotEnrolledError):
        lab.task("ann")


def test_a_failed_site_stays_failed(lab: Lab) -> None:
    lab.beat("ann", lab.task("ann").task_id, failure=FailureReason.DATA)
    before = lab.phase
    lab.restart()
    assert lab.phase == before
    assert lab.asked("ann") is None


def test_an_abandoned_attempt_is_followed_by_the_next_one(lab: Lab) -> None:
    lab.later(100.0, alive=SITES)
    lab.restart()
    assert lab.phase == phases.Idle(1, tries=1)


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


def test_a_published_round_whose_scores_nobody_asked_for_is_scored(make: MakeLab, fragile: Fragile) -> None:
    lab = make(ledger=fragile).begin()
    lab.push("ann", lab.model(1.0))
    lab.push("bob", lab.model(2.0))
    fragile.dies_at = fragile.writes + 4  # verdict, aggregation begun, publication, and now the invitations to score
    with pytest.raises(fragile.Died):
        lab.push("cyd", lab.model(6.0))
    lab.restart()
    assert isinstance(lab.phase, phases.Aggregating)
    assert lab.value == 3.0
    lab.later(0.0)
    assert [lab.asked(site) for site in (*SITES, "eva")] == [TaskKind.SCORE] * 4
    lab.later(0.0)
    assert len([task for task in lab.ledger.tasks("test", 1) if task.kind is TaskKind.SCORE]) == 4


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


def test_scores_of_a_second_attempts_model_are_not_asked_for_twice(lab: Lab) -> None:
    lab.later(100.0, alive=SITES)
    lab.later(0.0)
    lab.enroll("eva", role=Role.EVALUATOR)
    for site in SITES:
        lab.push(site, lab.model(VALUES[site]))
    lab.score("ann", 0.5)
    lab.restart()
    lab.later(0.0)
    assert isinstance(lab.phase, phases.Evaluating)
    assert lab.phase.awaited == {"bob", "cyd", "eva"}
    for site in ("bob", "cyd", "eva"):
        lab.score(site)
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
    lab.enroll(*SITES)
    lab.later(0.0)
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


def test_a_failed_run_stays_failed(lab: Lab) -> None:
    lab.run.handle(phases.Broken("disk"))
    lab.restart()
    assert lab.phase == phases.FinishedPhase("disk", RoundOutcome.FAILED)


def test_another_recipe_under_the_same_name_is_refused(make: MakeLab, lab: Lab) -> None:
    with pytest.raises(StateError, match="another recipe"):
        make(blobs=lab.blobs, ledger=lab.ledger, plan={"lr": 0.5})


def test_a_state_that_is_gone_is_said_at_once(lab: Lab) -> None:
    lab.blobs.discard(lab.address)
    with pytest.raises(StateError, match=lab.address):
        lab.restart()


def test_a_run_survives_on_disk(make: MakeLab, tmp_path: Path, lab: Lab) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    disk = make(blobs=FolderBlobs(tmp_path), ledger=Ledger(url)).begin()
    disk.push("ann", disk.model(1.0))
    disk.ledger.close()
    again = make(blobs=FolderBlobs(tmp_path), ledger=Ledger(url))
    again.enroll("eva", role=Role.EVALUATOR)
    again.enroll(*SITES)
    again.round(bob=2.0, cyd=6.0)
    lab.round(**VALUES)
    assert again.address == lab.address
    again.ledger.close()


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
def test_a_server_killed_at_any_of_its_writes_ends_with_the_same_bytes(
    make: MakeLab, fragile: Fragile, durably: bool
) -> None:
    reference, labs = wherever_killed(make, fragile, durably)
    assert reference.phase == phases.FinishedPhase("completed", RoundOutcome.COMPLETED)
    assert len(labs) > 20
    for lab in labs:
        assert lab.phase == reference.phase
        assert lab.address == reference.address
        assert accepted(lab) == accepted(reference)
        assert lab.ledger.scores("test") == reference.ledger.scores("test")


@pytest.mark.parametrize("durably", [False, True], ids=["before", "after"])
def test_a_server_killed_at_any_write_of_a_run_whose_models_are_refined_ends_with_the_same_bytes(
    make: MakeLab, fragile: Fragile, durably: bool
) -> None:
    reference, labs = wherever_killed(make, fragile, durably, method={"name": "fedic"})
    assert reference.phase == phases.FinishedPhase("completed", RoundOutcome.COMPLETED)
    assert reference.value == 12.0
    assert len(labs) > 26
    for lab in labs:
        assert (lab.phase, lab.address) == (reference.phase, reference.address)
        assert accepted(lab) == accepted(reference)
        assert [row.aggregate for row in lab.ledger.rounds("test")] == [
            row.aggregate for row in reference.ledger.rounds("test")
        ]


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
        assert lab.phase == reference.phase
        assert lab.address == reference.address
        assert [row.round for row in lab.ledger.rounds("test") if row.state] == [0, 1, 2, 3]
