"""A run from its first model to its last scores, through the real coordinator, ledger and blobs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from protofed.common import codec
from protofed.common.errors import FailureReason, FencedError, NotEnrolledError, ProtocolError
from protofed.common.payload import Part, same_tensors
from protofed.common.protocol.messages import (
    Activity,
    Finished,
    PauseReason,
    Role,
    Signal,
    Task,
    TaskKind,
    Verdict,
    Wait,
)
from protofed.server.methods.fedavg import FedAvgServer
from protofed.server.rounds.machine import phases
from protofed.server.storage.blobs import FolderBlobs
from protofed.server.verdicts import RejectionCode, RoundOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.conftest import Lab, Later, MakeLab

# The life of a run


def test_round_0_asks_two_trainers_for_a_model_and_nobody_else_for_anything(make: MakeLab) -> None:
    lab = make()
    lab.gather("eva")
    makers = lab.makers()
    assert len(makers) == 2
    task = lab.task(makers[0])
    assert (task.kind, task.round, task.base_digest, task.base_bytes) == (TaskKind.INITIALISE, 0, None, 0)
    assert [lab.asked(site) for site in ("ann", "bob", "cyd", "eva") if site not in makers] == [None, None]
    lab.push(makers[0], lab.model(0.0))
    assert isinstance(lab.intake.next_task(makers[0], f"daemon-{makers[0]}"), Wait)
    assert lab.run.published is None  # one site's word is none
    lab.push(makers[1], lab.model(0.0))
    assert lab.value == 0.0


def reasons(lab: Lab) -> list[str]:
    return [row.abandoned for row in lab.ledger.rounds("test") if row.round == 0 and row.abandoned]


def test_first_models_that_differ_do_not_count_and_all_sites_are_asked(make: MakeLab) -> None:
    lab = make()
    lab.gather()
    one, other = lab.makers()
    lab.push(one, lab.model(0.0))
    lab.push(other, lab.model(1.0))
    assert lab.run.published is None
    (reason,) = reasons(lab)
    for site, value in ((one, 0.0), (other, 1.0)):
        digest = lab.announce(lab.model(value))[0].digest
        assert f"{site}: its first model {digest[:16]}" in reason
    assert "versions of PyTorch" in reason
    lab.later(0)
    assert set(lab.makers()) == {"ann", "bob", "cyd"}
    (third,) = {"ann", "bob", "cyd"} - {one, other}
    lab.push(other, lab.model(1.0))
    lab.push(one, lab.model(0.0))
    assert lab.run.published is None  # all are waited for
    lab.push(third, lab.model(0.0))
    assert lab.value == 0.0
    tasks = {row.site: (row.task_status, row.reason) for row in lab.ledger.tasks("test", 0, 2)}
    assert tasks[other][0] == "rejected"
    assert "1 of 3 sites" in tasks[other][1]
    codes = {row.task.site: row.code for row in lab.ledger.updates("test", 0, 2)}
    assert codes == {other: RejectionCode.FIRST_MODEL, one: "", third: ""}


def test_a_run_whose_sites_never_agree_on_the_first_model_stops_and_names_their_digests(make: MakeLab) -> None:
    lab = make(federation={"max_attempts": 2})
    lab.enroll("ann", "bob", "cyd")
    for _ in range(2):
        lab.later(0)
        for site in lab.makers():
            lab.push(site, lab.model(float(ord(site[0]))))
    assert isinstance(lab.phase, phases.FinishedPhase)
    assert lab.phase.failed
    for site in ("ann", "bob", "cyd"):
        assert lab.announce(lab.model(float(ord(site[0]))))[0].digest[:16] in lab.phase.reason


def test_a_first_model_is_no_larger_than_the_recipe_says(make: MakeLab) -> None:
    lab = make(federation={"max_model_mb": 1e-4})
    lab.gather()
    receipt = lab.push(lab.makers()[0], lab.model(0.0))
    assert receipt.verdict is Verdict.REFUSED
    assert "max_model_mb" in receipt.reason


def test_the_first_model_opens_round_1_at_once_for_all_trainers_with_the_same_base(lab: Lab) -> None:
    tasks = [lab.task(site) for site in ("ann", "bob", "cyd")]
    assert {(task.kind, task.run, task.round) for task in tasks} == {(TaskKind.FIT, "test", 1)}
    assert {task.base_digest for task in tasks} == {lab.address}
    assert {task.base_bytes for task in tasks} == {len(lab.blobs.get(lab.address))}
    assert len({task.task_id for task in tasks}) == 3
    assert lab.asked("eva") is None


def test_a_run_ends_completed_with_the_mean_of_its_last_round(lab: Lab) -> None:
    lab.round(ann=1.0, bob=2.0, cyd=6.0)
    assert lab.value == 3.0
    assert lab.run.published is not None
    assert same_tensors(codec.decode(lab.blobs.get(lab.address)), lab.run.published.state)
    counter = lab.run.published.state[Part.BODY]["bn.batches"]
    assert (counter.dtype.name, counter.tolist()) == ("int64", [6])  # integers take the maximum
    lab.round(ann=2.0, bob=4.0, cyd=0.0)
    assert lab.value == 2.0
    assert lab.phase == phases.FinishedPhase("completed", RoundOutcome.COMPLETED)
    assert lab.intake.next_task("ann", "daemon-ann") == Finished("completed", last=True)
    row = lab.ledger.run("test")
    assert row is not None
    assert (row.reason, row.failed) == ("completed", False)
    assert row.ended_at is not None
    assert [(r.round, r.attempt, r.complete) for r in lab.ledger.rounds("test")] == [
        (0, 1, True),
        (1, 1, True),
        (2, 1, True),
    ]


def test_disclosed_counts_weight_the_mean_and_only_if_the_recipe_says_so(make: MakeLab) -> None:
    for weighting, mean in (("examples", 2.0), ("uniform", 3.0)):
        lab = make(method={"name": "fedavg", "weighting": weighting}, federation={"min_sites": 2}).begin()
        lab.push("ann", lab.model(0.0), weight=4)
        lab.push("bob", lab.model(8.0), weight=2)
        lab.push("cyd", lab.model(1.0 if weighting == "uniform" else 0.0), weight=2)
        assert lab.value == mean


@pytest.mark.parametrize("order", [("cyd", "bob", "ann"), ("bob", "cyd", "ann")])
def test_the_order_of_arrival_does_not_change_a_bit(make: MakeLab, order: tuple[str, ...]) -> None:
    values = {"ann": 0.1, "bob": 1e8, "cyd": -1e8}  # float32 sums of these depend on their order
    lab, other = make().begin(), make().begin()
    for site in ("ann", "bob", "cyd"):
        lab.push(site, lab.model(values[site]))
    for site in order:
        other.push(site, other.model(values[site]))
    assert lab.address == other.address


def test_a_task_says_how_long_it_may_take(lab: Lab) -> None:
    assert lab.task("ann").remaining_s == 100.0
    lab.later(30.0)
    assert lab.task("ann").remaining_s == 70.0
    lab.clock.now += 300
    assert lab.task("ann").remaining_s == 0.0  # no tick has noticed it yet


def test_only_the_blob_of_the_own_open_task_may_be_fetched(lab: Lab) -> None:
    base = lab.address
    assert lab.run.invitations.may_fetch("ann", base)
    assert not lab.run.invitations.may_fetch("eva", base)
    lab.push("ann", lab.model(1.0))
    assert not lab.run.invitations.may_fetch("ann", base)
    update = lab.ledger.updates("test", 1)[0].digest
    assert not lab.run.invitations.may_fetch("bob", update)


# Rounds that do not go well


def test_a_round_closes_without_a_site_that_fell_silent(lab: Lab) -> None:
    lab.push("ann", lab.model(1.0))
    lab.push("bob", lab.model(3.0))
    lab.later(51.0, alive=("ann", "bob", "eva"))
    assert lab.value == 2.0
    assert [(r.round, r.complete) for r in lab.ledger.rounds("test")[:2]] == [(0, True), (1, False)]
    statuses = {task.site: task.task_status for task in lab.ledger.tasks("test", 1, 1) if task.kind is TaskKind.FIT}
    assert statuses == {"ann": "reported", "bob": "reported", "cyd": "late"}


def test_a_round_below_quorum_is_abandoned_and_the_state_is_untouched(lab: Lab) -> None:
    before, old = lab.address, lab.task("bob").task_id
    lab.push("ann", lab.model(8.0))
    lab.later(100.0, alive=("ann", "bob", "cyd"))
    assert lab.phase == phases.Idle(1, tries=1)
    assert lab.address == before
    lab.later(0.5)
    assert lab.task("bob").round == 1
    assert lab.task("bob").task_id != old
    lab.round(ann=1.0, bob=1.0, cyd=1.0)
    assert lab.value == 1.0  # the update of the abandoned attempt does not count


def test_an_operators_stop_is_no_failure(lab: Lab) -> None:
    lab.run.stop("enough")
    assert lab.phase == phases.FinishedPhase("enough", RoundOutcome.ABORTED)
    assert lab.intake.next_task("ann", "daemon-ann") == Finished("enough", last=True)
    lab.later(1000.0)
    assert lab.phase == phases.FinishedPhase("enough", RoundOutcome.ABORTED)


def test_an_aggregate_that_is_not_finite_fails_the_run_and_publishes_nothing(make: MakeLab) -> None:
    lab = make(federation={"max_update_norm": 1e300}).begin()
    before, largest = lab.address, float(np.finfo(np.float32).max)
    for site in ("ann", "bob"):
        lab.push(site, lab.model(largest))
    with np.errstate(over="ignore"):
        lab.push("cyd", lab.model(largest))
    assert isinstance(lab.phase, phases.FinishedPhase)
    assert lab.phase.failed
    assert "round 1 could not be aggregated" in lab.phase.reason
    assert "not finite" in lab.phase.reason
    assert lab.address == before
    assert lab.ledger.rounds("test")[-1].state is None


def test_a_method_that_raises_fails_the_run_by_the_name_of_its_error_alone(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def aggregate(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(FedAvgServer, "aggregate", aggregate)
    lab.round(ann=1.0, bob=2.0, cyd=3.0)
    assert lab.phase == phases.FinishedPhase("round 1 could not be aggregated: ZeroDivisionError", RoundOutcome.FAILED)


@pytest.fixture
def rotting(make: MakeLab, tmp_path: Path) -> Callable[..., Lab]:
    """A lab in which these sites' updates of round 1 rot on the disk before the last site's comes."""

    def make_rotting(*sites: str, **tables: Any) -> Lab:
        lab = make(blobs=FolderBlobs(tmp_path), **tables).begin()
        for site, value in (("ann", 1.0), ("bob", 3.0)):
            lab.push(site, lab.model(value))
        for row in lab.ledger.updates("test", 1):
            if row.task.site in sites:
                path = tmp_path / row.digest
                path.write_bytes(path.read_bytes()[:-1] + b"!")
        lab.push("cyd", lab.model(5.0))
        return lab

    return make_rotting


def test_an_update_that_rotted_on_disk_is_rejected_by_name_and_never_averaged(rotting: Callable[..., Lab]) -> None:
    lab = rotting("ann")
    assert lab.value == 4.0
    (task,) = (task for task in lab.ledger.tasks("test", 1) if task.task_status == "rejected")
    update = lab.ledger.updates("test", 1)[0]
    assert (task.site, update.task.site) == ("ann", "ann")
    assert "has changed on disk" in task.reason
    assert (update.verdict, update.code, update.rejected) == (Verdict.ACCEPTED, RejectionCode.UNREADABLE, task.reason)
    assert lab.ledger.rounds("test")[1].complete is False  # the run says that it is degraded


def test_a_model_that_rots_while_sites_fetch_it_is_written_again_for_the_next_attempt(
    make: MakeLab, tmp_path: Path
) -> None:
    """Sites refuse it by its digest; the state is in memory."""
    lab = make(blobs=FolderBlobs(tmp_path)).begin()
    base = lab.task("ann").base_digest
    assert base is not None
    (tmp_path / base).write_bytes(b"rotten")
    for site in ("ann", "bob"):  # cyd alone is no quorum
        lab.beat(site, lab.task(site).task_id, activity=Activity.FAILED, failure=FailureReason.REFUSED)
    lab.later(20.0, alive=("ann", "bob", "cyd"))
    assert (lab.task("ann").attempt, lab.task("ann").base_digest) == (2, base)
    assert lab.has(base)


def test_too_few_updates_that_can_still_be_read_abandon_the_attempt_and_leave_the_state(
    rotting: Callable[..., Lab],
) -> None:
    lab = rotting("ann", "bob")
    assert lab.value == 0.0
    assert lab.phase == phases.Idle(1, tries=1, since=None, again_at=10.0)
    lab.later(10.0)
    assert isinstance(lab.phase, phases.Collecting)
    assert (lab.phase.round, lab.phase.attempt, lab.phase.tries) == (1, 2, 1)
    abandoned = lab.ledger.rounds("test")[1].abandoned
    assert abandoned is not None
    assert abandoned.startswith("1 update left, quorum 2 (ann: blob")


def test_an_outlier_is_rejected_and_the_rest_averaged(lab: Lab) -> None:
    for site, value in (("ann", 1.0), ("bob", 1e4), ("cyd", 3.0)):
        assert lab.push(site, lab.model(value)).verdict is Verdict.ACCEPTED
    assert lab.value == 2.0
    task = next(task for task in lab.ledger.tasks("test", 1) if (task.site, task.kind) == ("bob", TaskKind.FIT))
    assert task.task_status == "rejected"
    assert "more than 20 times the cohort's median" in task.reason
    aside = lab.ledger.updates("test", 1)[1]
    assert (aside.code, aside.rejected) == (RejectionCode.OUTLIER, task.reason)
    assert lab.has(aside.digest)  # kept, and named


@pytest.mark.parametrize("weight", [9.0, 1001.0])
def test_an_example_count_that_jumps_is_refused(lab: Lab, weight: float) -> None:
    lab.push("ann", lab.model(1.0), weight=100.0)
    lab.round(bob=1.0, cyd=1.0)
    receipt = lab.push("ann", lab.model(1.0), weight=weight)
    assert (receipt.verdict, receipt.reason) == (
        Verdict.REFUSED,
        f"an example count of {weight:g} after 100: expected at most 10 times more or less",
    )
    assert lab.push("ann", lab.model(1.0), weight=120.0).verdict is Verdict.ACCEPTED


def test_a_site_cannot_fill_the_disk_with_updates_that_are_refused(lab: Lab) -> None:
    for number in range(8):
        task = lab.task("ann")
        assert lab.push("ann", lab.model(1e30 + number * 1e29)).verdict is Verdict.REFUSED
    assert lab.asked("ann") is None  # nor is it waited for any more
    with pytest.raises(ProtocolError, match="8 updates were refused for this task"):
        lab.push("ann", lab.model(1.0), task)
    assert isinstance(lab.phase, phases.Collecting)
    assert lab.phase.failed == {"ann"}
    lab.round(bob=1.0, cyd=1.0)
    assert lab.value == 1.0


# Heartbeats


def test_a_heartbeat_of_the_open_task_goes_on_and_one_that_nobody_waits_for_aborts(lab: Lab) -> None:
    old, bobs = lab.task("ann").task_id, lab.task("bob").task_id
    for epoch in (1, 2):
        assert lab.beat("ann", old, epoch=epoch) is Signal.CONTINUE
    row = lab.ledger.task(old)
    assert row is not None
    assert row.task_status == "started"
    assert lab.beat("ann", bobs) is Signal.ABORT
    assert lab.beat("ann", "never-given") is Signal.ABORT
    lab.later(100.0, alive=("ann", "bob", "cyd"))
    assert lab.beat("ann", old) is Signal.ABORT
    lab.later(0.5)
    assert lab.beat("ann", old) is Signal.ABORT
    assert lab.beat("ann", lab.task("ann").task_id) is Signal.CONTINUE


def test_a_failure_is_written_down_and_the_site_is_asked_no_more_in_this_round(lab: Lab) -> None:
    task_id = lab.task("ann").task_id
    assert lab.beat("ann", task_id, activity=Activity.FAILED, failure=FailureReason.OUT_OF_MEMORY) is Signal.CONTINUE
    row = lab.ledger.task(task_id)
    assert row is not None
    assert (row.task_status, row.reason) == ("failed", "out-of-memory")
    assert lab.asked("ann") is None
    assert lab.beat("ann", task_id) is Signal.ABORT
    lab.round(bob=1.0, cyd=3.0)
    assert lab.value == 2.0
    assert lab.ledger.rounds("test")[1].complete is False


def test_the_next_round_counts_no_site_that_has_left_though_it_has_not_enrolled_again(lab: Lab) -> None:
    """Its fit ends a batch later, and its daemon enrolls after that: of three sites that a round needs two are left."""
    for site in ("bob", "cyd"):
        lab.push(site, lab.model(1.0))
    lab.beat("ann", lab.task("ann").task_id, activity=Activity.FAILED, failure=FailureReason.WITHDRAWN)
    for site in ("bob", "cyd", "eva"):
        lab.score(site)
    lab.later(0)
    assert isinstance(lab.phase, phases.Idle)
    assert lab.phase.round == 2
    assert lab.presence.pause_reason("ann") is PauseReason.WITHDRAWN
    lab.enroll("ann")  # its people have changed their minds
    lab.later(0)
    assert [lab.asked(site) for site in ("ann", "bob", "cyd")] == [TaskKind.FIT] * 3


def test_a_site_that_left_in_a_task_which_nobody_waits_for_any_more_has_left_all_the_same(lab: Lab) -> None:
    task = lab.task("cyd")
    assert lab.beat("cyd", "another", activity=Activity.FAILED, failure=FailureReason.WITHDRAWN) is Signal.ABORT
    assert lab.presence.enrolled(Role.TRAINER) == {"ann", "bob"}
    assert lab.task("cyd") == task  # by asking for a task it says that it takes part
    assert lab.presence.enrolled(Role.TRAINER) == {"ann", "bob", "cyd"}


def test_failures_that_make_the_quorum_unreachable_abandon_at_once(lab: Lab) -> None:
    for site in ("ann", "bob"):
        lab.beat(site, lab.task(site).task_id, activity=Activity.FAILED, failure=FailureReason.DATA)
    assert isinstance(lab.phase, phases.Idle)
    assert (lab.phase.round, lab.phase.tries) == (1, 1)
    assert lab.ledger.rounds("test")[-1].abandoned == "2 of 3 sites cannot do the task: ann, bob (last reason: data)"
    lab.later(0.0)
    assert lab.asked("ann") is None  # it cannot be well again yet
    lab.later(2 * lab.recipe.federation.heartbeat_s)
    assert lab.asked("ann") is TaskKind.FIT


def test_a_hung_site_is_lost_although_its_heart_beats(lab: Lab) -> None:
    task_id = lab.task("cyd").task_id
    lab.push("ann", lab.model(1.0))
    lab.push("bob", lab.model(3.0))
    for _ in range(6):
        assert lab.beat("cyd", task_id, epoch=1, epochs=3) is Signal.CONTINUE
        lab.clock.now += 9.0
    assert lab.value == 0.0
    lab.run.tick()
    assert lab.value == 2.0


# Scores


def test_the_next_round_opens_when_all_scores_are_there(lab: Lab) -> None:
    lab.train(1.0)
    tasks = [lab.task(site) for site in ("ann", "bob", "cyd", "eva")]
    assert {(task.kind, task.round, task.base_digest) for task in tasks} == {(TaskKind.SCORE, 1, lab.address)}
    for site, value in (("ann", 0.5), ("bob", 0.25), ("cyd", 1.0)):
        lab.score(site, value)
    assert isinstance(lab.phase, phases.Evaluating)
    lab.score("eva", 0.75)
    assert lab.asked("ann") is TaskKind.FIT
    trainers = {site: {"personal.accuracy": value} for site, value in (("ann", 0.5), ("bob", 0.25), ("cyd", 1.0))}
    assert lab.ledger.scores("test")[1] == {**trainers, "eva": {"global.accuracy": 0.75}}


def test_a_method_without_a_global_model_asks_no_evaluator_for_scores(make: MakeLab) -> None:
    lab = make(method={"name": "solo"}).begin()
    for site in ("ann", "bob", "cyd"):
        lab.push(site, {})
    assert (lab.asked("ann"), lab.asked("eva")) == (TaskKind.SCORE, None)
    assert lab.value == 0.0


def test_scores_sent_twice_or_too_late_are_dropped_politely(lab: Lab) -> None:
    lab.train(1.0)
    anns, bobs = lab.task("ann"), lab.task("bob")
    lab.score("ann", 0.5, anns)
    lab.score("ann", 0.75, anns)
    for site in ("eva", "cyd"):
        lab.score(site)
    lab.later(100.0, alive=("ann", "bob", "cyd"))
    lab.later(0.0)
    assert lab.asked("bob") is TaskKind.FIT
    lab.score("bob", 0.5, bobs)
    scores = lab.ledger.scores("test")[1]
    assert scores["ann"] == {"personal.accuracy": 0.5}
    assert "bob" not in scores


REFUSED_SCORES: dict[str, tuple[str, dict[str, float]]] = {
    "a trainer's score of the global model": ("ann", {"personal.accuracy": 0.5, "global.accuracy": 1.0}),
    "an evaluator's of its own": ("eva", {"global.accuracy": 0.5, "personal.accuracy": 0.5}),
    "a number that no score has": ("eva", {"global.accuracy": 1e308}),
    "not a number": ("ann", {"personal.accuracy": float("nan")}),
    "a class that the run has not": ("ann", {"personal.recall.3": 0.5}),
    "an invented name": ("ann", {"personal.accuracy": 0.5, "exc_info": 0.5}),
    "a long name": ("ann", {"n" * 100_000: 1.0}),
    "two thousand names": ("ann", {f"personal.recall.{n}": 1.0 for n in range(2048)}),
    "what [evaluation] has switched off": ("eva", {"global.ece": 0.5}),
    "a loss, which training reports": ("ann", {"loss": 0.5}),
}


@pytest.mark.parametrize(("site", "scores"), REFUSED_SCORES.values(), ids=REFUSED_SCORES)
def test_scores_that_cannot_be_are_refused_whole_and_the_site_is_not_asked_again(
    lab: Lab, site: str, scores: dict[str, float]
) -> None:
    for trainer in ("ann", "bob", "cyd"):
        lab.push(trainer, lab.model(1.0))
    task = lab.task(site)
    with pytest.raises(ProtocolError, match="scores refused: "):
        lab.intake.report_scores(site, f"daemon-{site}", task.task_id, scores)
    assert lab.ledger.scores("test") == {}
    assert lab.asked(site) is None  # the same model would give the same scores
    lab.intake.report_scores(site, f"daemon-{site}", task.task_id, {"personal.accuracy": 0.5})  # too late
    for other in {"ann", "bob", "cyd", "eva"} - {site}:
        lab.score(other)
    assert lab.asked(site) is (TaskKind.FIT if site == "ann" else None)
    assert site not in lab.ledger.scores("test")[1]
    (row,) = [row for row in lab.ledger.tasks("test", 1) if (row.site, row.kind) == (site, TaskKind.SCORE)]
    assert (row.task_status, row.reason) == ("failed", "its scores were refused")


@pytest.mark.parametrize("name", ["run", "round", "event", "exc_info", "global.accuracy", "train.", "train.X"])
def test_an_update_with_a_number_that_no_training_gives_is_refused(lab: Lab, name: str) -> None:
    receipt = lab.push("ann", lab.model(1.0), metrics={name: 0.5})
    assert (receipt.verdict, lab.ledger.updates("test", 1)[0].code) == (Verdict.REFUSED, "scalars")
    assert lab.ledger.updates("test", 1)[0].metrics == {}


def test_scores_do_not_answer_a_fit_task_nor_another_sites(lab: Lab) -> None:
    with pytest.raises(ProtocolError, match="no such task"):
        lab.score("ann", task=lab.task("ann"))
    lab.train(1.0)
    with pytest.raises(ProtocolError, match="no such task"):
        lab.score("ann", task=lab.task("bob"))


# Who may call


def test_nobody_gets_a_task_without_enrolling_and_the_older_daemon_none_at_all(lab: Lab) -> None:
    with pytest.raises(NotEnrolledError):
        lab.intake.next_task("zoe", "daemon-zoe")
    task = lab.task("ann")
    lab.presence.enroll("ann", {Role.TRAINER}, "newer")
    with pytest.raises(FencedError):
        lab.task("ann")
    with pytest.raises(FencedError):
        lab.push("ann", lab.model(1.0), task)
    assert lab.ledger.updates("test", 1) == []
    again = lab.intake.next_task("ann", "newer")
    assert isinstance(again, Task)
    assert again.task_id == task.task_id


# Aggregation on another thread


def test_while_a_round_is_aggregated_nothing_moves_and_late_updates_are_stale(make: MakeLab, workshop: Later) -> None:
    lab = make(work=workshop)
    lab.gather("eva")
    lab.first_models()
    assert isinstance(lab.phase, phases.Aggregating)
    workshop.finish()
    makers, trainers = lab.told  # that there is something to ask for
    assert makers is not None
    assert (len(makers), makers < {"ann", "bob", "cyd"}, trainers) == (2, True, frozenset({"ann", "bob", "cyd"}))
    late = lab.task("cyd")
    lab.push("ann", lab.model(1.0))
    lab.push("bob", lab.model(3.0))
    lab.later(51.0, alive=("ann", "bob", "eva"))
    assert isinstance(lab.phase, phases.Aggregating)
    assert lab.push("cyd", lab.model(5.0), late).verdict is Verdict.LATE
    assert lab.asked("ann") is None
    lab.later(1000.0)
    assert isinstance(lab.phase, phases.Aggregating)
    workshop.finish()
    assert lab.value == 2.0
    for site in ("ann", "bob", "cyd", "eva"):
        lab.score(site) if lab.asked(site) else None
    lab.later(1000.0)
    lab.gather()
    lab.train(7.0)
    assert isinstance(lab.phase, phases.Aggregating)
    lab.run.stop("enough")
    assert lab.told[-1] is None
    workshop.finish()  # which changes nothing any more
    assert (lab.run.phase, lab.value) == (phases.FinishedPhase("enough", RoundOutcome.ABORTED), 2.0)
