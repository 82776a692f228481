"""A hospital leaves a run now: what is under way ends, nothing more of it leaves, and the server is told."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.scripted_server import RULES, AgentHarness, work

from protofed.client.agent.heartbeat import DecisionWatch
from protofed.client.models.split import SplitModel
from protofed.client.policy.approval import FOLDER, Approvals, ApprovalStatus
from protofed.client.state.decisions import FOLDER as DECISIONS
from protofed.client.state.decisions import Act, Decision, Decisions
from protofed.client.state.disk_store import DiskStore
from protofed.client.training.progress import FOLDER as CHECKPOINTS
from protofed.client.training.progress import on_disk
from protofed.common.config.recipe import Recipe
from protofed.common.errors import FailureReason, OutOfSpaceError, UnavailableError
from protofed.common.protocol.messages import Finished, PauseReason, Task, Wait

AT = "2026-06-01T12:00:00Z"


@pytest.fixture
def harness(tmp_path: Path) -> AgentHarness:
    return AgentHarness(store=DiskStore(tmp_path), rules=RULES)


class Hospital:
    """Leaves the run, and is the daemon's watch."""

    def __init__(self, folder: Path, harness: AgentHarness) -> None:
        self.approvals, self.decisions = Approvals(folder / FOLDER), Decisions(folder / DECISIONS)
        self.lines: list[Decision] = []
        self.cancelled: list[str] = []
        self.watch = DecisionWatch(
            self.decisions, self.approvals, harness.now, harness.link, self.cancelled.append, self.lines.append
        )

    def leave(self) -> None:
        self.approvals.deny(self.approvals.offer("run"), took_part=True)
        self.decisions.add(Decision(Act.WITHDRAW, AT, "ann", "run"))

    def come_back(self) -> None:
        self.approvals.approve(self.approvals.offer("run"))


@pytest.fixture
def hospital(tmp_path: Path, harness: AgentHarness) -> Hospital:
    return Hospital(tmp_path, harness)


def on_first_batch(act: Callable[[], None]) -> Callable[[SplitModel], SplitModel]:
    left = [act]

    def wrap(model: SplitModel) -> SplitModel:
        model.register_forward_pre_hook(lambda *_: left.pop()() if left else None)
        return model

    return wrap


def test_a_fit_ends_and_is_declined_by_its_own_code(harness: AgentHarness, hospital: Hospital, tmp_path: Path) -> None:
    def leave() -> None:
        hospital.leave()
        hospital.watch.look()
        assert harness.declined() == [(task.task_id, FailureReason.WITHDRAWN)]  # before the fit has noticed
        assert [line.act for line in hospital.lines] == [Act.WITHDRAW]

    harness.wrap, harness.checkpoints = on_first_batch(leave), lambda task: on_disk(tmp_path, task)
    task = harness.fit(1)
    daemon = harness.agent()
    work(daemon, 1)
    assert set(harness.declined()) == {(task.task_id, FailureReason.WITHDRAWN)}
    assert (harness.link.tried, harness.store.unsettled("run"), hospital.cancelled) == ([], [], ["run"])
    assert list((tmp_path / CHECKPOINTS).glob("*.safetensors")) == []
    work(daemon, 1)
    assert harness.link.pause_reasons[-1] is PauseReason.WITHDRAWN
    assert hospital.approvals.status("run", harness.link.recipe) is ApprovalStatus.WITHDRAWN


def test_without_its_watch_a_fit_is_not_sent_either(harness: AgentHarness, hospital: Hospital) -> None:
    """The link asks the file itself: see `test_grpc_link`. Here the watch comes between two batches."""
    harness.wrap = on_first_batch(hospital.leave)
    harness.fit(1)
    harness.link.before_push = lambda task: hospital.approvals.check_not_out(task.run)
    work(harness.agent(), 1)
    assert harness.link.tried == []
    assert [reason for _, reason in harness.declined()] == [FailureReason.WITHDRAWN]


def test_an_update_that_waits_is_never_sent(harness: AgentHarness, hospital: Hospital, tmp_path: Path) -> None:
    harness.fit(1)
    harness.link.failing["push"] = [UnavailableError("the connection was closed")]
    with pytest.raises(UnavailableError):
        harness.agent().step(0.0)
    assert len(harness.store.unsettled("run")) == 1
    hospital.leave()
    harness.restart(tmp_path)
    daemon = harness.agent()
    work(daemon, 2)
    assert (harness.store.unsettled("run"), harness.link.calls["push"]) == ([], 1)
    hospital.come_back()
    work(daemon, 2)
    assert harness.link.calls["push"] == 1


def test_a_daemon_outlives_an_undead_update(
    harness: AgentHarness, hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.fit(1)
    daemon = harness.agent()
    harness.link.failing["push"] = [UnavailableError("the connection was closed")]
    with pytest.raises(UnavailableError):
        daemon.step(0.0)
    hospital.leave()

    def read_only(_run: str, _rounds: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(harness.store, "_discard", read_only)
    work(daemon, 2)
    assert harness.link.pause_reasons[-1] is PauseReason.WITHDRAWN
    assert harness.link.calls["push"] == 1


def test_a_task_that_comes_after_it_is_declined_without_any_data(harness: AgentHarness, hospital: Hospital) -> None:
    daemon = harness.agent()
    work(daemon, 1)  # enrolled
    loads, give, task = harness.counting_loads(), harness.link.next_task, harness.fit(1)

    def left_meanwhile(run: str, wait_s: float) -> Task | Wait | Finished:
        hospital.leave()
        return give(run, wait_s)

    harness.link.next_task = left_meanwhile  # type: ignore[method-assign]
    work(daemon, 3)
    assert harness.declined() == [(task.task_id, FailureReason.WITHDRAWN)]
    assert (loads, harness.link.calls["fetch"], harness.link.pushed) == ([], 0, [])
    assert harness.link.pause_reasons[-2:] == [PauseReason.WITHDRAWN] * 2


def test_a_run_denied_before_it_began_loads_nothing(harness: AgentHarness, hospital: Hospital) -> None:
    loads = harness.counting_loads()
    harness.rules = {**RULES, "approval": "manual"}
    daemon = harness.agent()
    work(daemon, 1)
    hospital.approvals.deny(hospital.approvals.offer("run"))
    harness.fit(1)
    work(daemon, 2)
    assert (loads, harness.link.calls["next_task"]) == ([], 0)
    assert hospital.approvals.status("run", harness.link.recipe) is ApprovalStatus.DENIED


def test_a_run_that_the_policy_refuses_has_no_first_task(harness: AgentHarness, hospital: Hospital) -> None:
    harness.rules = {**RULES, "methods": []}
    daemon, task = harness.agent(), harness.fit(1)
    work(daemon, 2)
    assert harness.declined() == [(task.task_id, FailureReason.POLICY)]
    assert hospital.approvals.first_task_at("run") == ""


def test_an_approval_takes_it_back(harness: AgentHarness, hospital: Hospital) -> None:
    daemon = harness.agent()
    work(daemon, 1)
    hospital.leave()
    hospital.watch.look()
    work(daemon, 2)
    hospital.come_back()
    task = harness.fit(1)
    work(daemon, 2)  # although the watch has not looked again
    assert [pushed for pushed, _ in harness.link.pushed] == [task]


def test_another_run_is_not_left(harness: AgentHarness, hospital: Hospital) -> None:
    daemon = harness.agent()
    work(daemon, 1)
    hospital.leave()
    hospital.watch.look()
    work(daemon, 1)
    harness.link.run = "next"
    harness.link.recipe = Recipe.model_validate({**harness.recipe, "name": "next"}).wire()
    task = harness.fit(1)
    work(daemon, 3)
    assert [pushed for pushed, _ in harness.link.pushed] == [task]


def test_a_decision_during_a_look_is_audited_once_after_it_has_taken_effect(
    harness: AgentHarness, hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(harness.agent(), 1)
    check = Approvals.check_not_out

    def left_meanwhile(approvals: Approvals, run: str) -> None:
        check(approvals, run)
        hospital.leave()
        monkeypatch.undo()

    monkeypatch.setattr(Approvals, "check_not_out", left_meanwhile)
    hospital.watch.look()
    assert (hospital.cancelled, hospital.lines) == ([], [])
    for _ in range(3):  # the run is left once
        hospital.watch.look()
    assert (hospital.cancelled, len(hospital.lines), harness.link.beats) == (["run"], 1, [])


def test_a_decision_waits_for_room_in_the_audit_log(harness: AgentHarness, hospital: Hospital, tmp_path: Path) -> None:
    def full(_: Decision) -> None:
        raise OutOfSpaceError("no room")

    work(harness.agent(), 1)
    hospital.leave()
    link = (harness.now, harness.link, hospital.cancelled.append)
    with pytest.raises(OutOfSpaceError):
        DecisionWatch(hospital.decisions, hospital.approvals, *link, full).look()
    assert harness.now.left_run == "run"  # in force all the same
    assert len(list((tmp_path / DECISIONS).iterdir())) == 1
    hospital.watch.look()
    assert [line.by for line in hospital.lines] == ["ann"]
    assert list((tmp_path / DECISIONS).iterdir()) == []
