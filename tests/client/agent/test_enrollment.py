"""A site that waits for its approval or its hours is there, says why, and takes no task."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.support.clock import Clock
from tests.support.scripted_server import RULES, RUN, AgentHarness, first_model, work

from protofed.client.agent.agent import PAUSED_RETRY_S, Agent, TaskGate
from protofed.client.policy.approval import FOLDER, Approvals, ApprovalStatus
from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import PolicyRules
from protofed.client.state.disk_store import DiskStore
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, FailureReason, NotEnrolledError, OutOfSpaceError, PolicyViolationError
from protofed.common.protocol.messages import Assignment, Finished, PauseReason, Task, Wait

MANUAL = {**RULES, "approval": "manual"}
NIGHTS = {**RULES, "schedule": [{"from": "20:00", "until": "06:00"}]}
OTHER = Recipe.model_validate({**RUN, "rounds": 2}).wire()


Opened = Callable[..., tuple[AgentHarness, Agent]]


@pytest.fixture
def opened(tmp_path: Path, approvals: Approvals, clock: Clock) -> Opened:
    """A site with a state folder, and its daemon; both look at `clock`."""

    def make(rules: dict[str, object]) -> tuple[AgentHarness, Agent]:
        harness = AgentHarness(store=DiskStore(tmp_path / "state"), rules=rules)
        daemon = harness.agent()
        made = Agent(daemon._site, harness.link, harness.now, harness.pauses.append, _door(daemon, approvals, clock))
        return harness, made

    return make


def _door(daemon: Agent, approvals: Approvals, clock: Clock) -> TaskGate:
    return TaskGate(lambda: daemon._site.policy.rules, approvals, clock)


# Approval


def test_a_run_waits_until_it_is_approved(opened: Opened, approvals: Approvals) -> None:
    harness, daemon = opened(MANUAL)
    loads = harness.counting_loads()
    task = harness.fit(1)
    work(daemon, 3)
    assert harness.link.pause_reasons == [PauseReason.APPROVAL] * 3
    assert harness.pauses == [PAUSED_RETRY_S] * 3
    assert (harness.link.calls["next_task"], loads, harness.now.run) == (0, [], "")
    approvals.approve(approvals.offer("run"))
    work(daemon, 1)
    assert harness.link.pause_reasons[3:] == [PauseReason.NONE]
    assert [pushed for pushed, _ in harness.link.pushed] == [task]
    assert harness.pauses == [PAUSED_RETRY_S] * 3


@pytest.fixture
def running(opened: Opened, approvals: Approvals) -> tuple[AgentHarness, Agent]:
    """A site that needs approvals and has one for its run."""
    harness, daemon = opened(MANUAL)
    work(daemon, 1)
    approvals.approve(approvals.offer("run"))
    return harness, daemon


@pytest.fixture
def approved(running: tuple[AgentHarness, Agent], tmp_path: Path) -> AgentHarness:
    running[0].restart(tmp_path / "state")
    return running[0]


def test_an_approved_run_needs_no_other_one_after_a_restart(approved: AgentHarness) -> None:
    again = approved.agent()
    approved.fit(1)
    work(again, 2)
    assert approved.link.pause_reasons == [PauseReason.APPROVAL, PauseReason.NONE]  # APPROVAL would end its open task
    assert len(approved.link.pushed) == 1


def test_a_restarted_daemon_presumes_the_approved_run_only_until_it_is_offered_one(approved: AgentHarness) -> None:
    again, loads = approved.agent(), approved.counting_loads()
    approved.link.run = "next"
    approved.fit(1)
    work(again, 3)
    assert approved.link.pause_reasons[1:] == [PauseReason.NONE, PauseReason.APPROVAL, PauseReason.APPROVAL]
    assert approved.pauses[1:] == [0.0, PAUSED_RETRY_S, PAUSED_RETRY_S]
    assert (approved.link.calls["next_task"], approved.link.tried, loads) == (0, [], [])


def test_a_restarted_daemon_without_a_run_says_that_the_next_one_needs_an_approval(approved: AgentHarness) -> None:
    again, told, over = approved.agent(), list[PauseReason](), Finished("nothing is queued", last=True)
    approved.link.enroll = lambda reason, _wait_s: told.append(reason) or over  # type: ignore[method-assign, misc, assignment, func-returns-value]
    assert [again.step(0.0), again.step(0.0)] == [Wait(0.0), over]
    assert told == [PauseReason.NONE, PauseReason.APPROVAL]


@pytest.mark.parametrize("decision", ["none", "denied", "withdrawn", "changed", "paused"])
def test_a_restarted_daemon_presumes_no_run_that_is_not_approved(
    decision: str, opened: Opened, approvals: Approvals, tmp_path: Path
) -> None:
    harness, daemon = opened(MANUAL)
    work(daemon, 1)
    if decision != "none":
        approvals.approve(approvals.offer("run"))
    if decision in ("denied", "withdrawn"):
        approvals.deny(approvals.offer("run"), took_part=decision == "withdrawn")
    if decision == "changed":
        approvals.record_offer(Assignment("run", OTHER))
    harness.restart(tmp_path / "state")
    if decision == "paused":
        pause = harness.store.pause
        assert pause is not None
        pause.begin()
    work(harness.agent(), 1)
    expected = PauseReason.PAUSED if decision == "paused" else PauseReason.APPROVAL
    assert harness.link.pause_reasons[1] is expected
    assert harness.link.calls["next_task"] == 0


def test_an_approval_is_of_one_recipe(running: tuple[AgentHarness, Agent], approvals: Approvals) -> None:
    harness, daemon = running
    work(daemon, 2)
    harness.link.recipe = OTHER
    harness.link.failing["next_task"] = [NotEnrolledError("restarted")]
    harness.fit(1)
    work(daemon, 4)
    assert harness.link.pause_reasons[-3:] == [PauseReason.NONE, PauseReason.APPROVAL, PauseReason.APPROVAL]
    assert harness.link.pushed == []
    assert approvals.status("run", OTHER) is ApprovalStatus.CHANGED
    approvals.approve(approvals.offer("run"))
    work(daemon, 2)
    assert len(harness.link.pushed) == 1


def test_the_next_run_is_not_known_and_not_approved(running: tuple[AgentHarness, Agent], approvals: Approvals) -> None:
    harness, daemon = running
    harness.link.tasks.append(Finished("completed", last=False))
    work(daemon, 1)
    harness.link.run = "next"
    work(daemon, 2)
    assert harness.link.pause_reasons[1:] == [PauseReason.NONE, PauseReason.APPROVAL, PauseReason.APPROVAL]
    assert {offer.run for offer in approvals.offers()} == {"run", "next"}


def test_an_approval_that_is_taken_back_ends_with_a_task(running: tuple[AgentHarness, Agent], tmp_path: Path) -> None:
    harness, daemon = running
    work(daemon, 2)
    (tmp_path / "state" / FOLDER / "run.json").unlink()
    harness.fit(1)
    work(daemon, 2)
    assert harness.link.pushed == []
    assert harness.link.pause_reasons[-1] is PauseReason.APPROVAL


def test_what_was_computed_is_not_handed_in_while_the_site_waits(opened: Opened, tmp_path: Path) -> None:
    harness, daemon = opened(RULES)
    harness.fit(1)
    harness.link.failing["push"] = [NotEnrolledError("restarted")]
    work(daemon, 1)
    harness.rules = MANUAL
    harness.restart(tmp_path / "state")
    work(harness.agent(), 2)
    assert harness.link.calls["push"] == 1


def test_a_site_without_a_place_for_approvals_has_none() -> None:
    harness = AgentHarness(rules=MANUAL)
    harness.fit(1)
    work(harness.agent(), 3)
    assert harness.link.pause_reasons == [PauseReason.APPROVAL] * 3


def test_a_server_that_has_no_run_is_asked_again_and_waits_for_one_once_it_has_answered(opened: Opened) -> None:
    """Whether the server is there at all is known at once."""
    harness, daemon = opened(MANUAL)
    over, waits = Finished("nothing is queued", last=True), list[float]()
    harness.link.enroll = lambda _reason, wait_s: waits.append(wait_s) or over  # type: ignore[method-assign, misc, assignment, func-returns-value]
    assert [daemon.step(20.0, run_wait_s) for run_wait_s in (20.0, 20.0, 0.0)] == [over] * 3
    assert (waits, harness.pauses) == ([0.0, 20.0, 0.0], [])


# Schedule


def test_tasks_are_taken_in_the_sites_hours(opened: Opened, clock: Clock) -> None:
    harness, daemon = opened(NIGHTS)
    first = harness.fit(1)
    work(daemon, 2)
    assert harness.link.pause_reasons == [PauseReason.SCHEDULE] * 2
    clock.at(20)
    work(daemon, 1)
    assert harness.link.pause_reasons[2:] == [PauseReason.NONE]
    clock.at(5)
    harness.link.before_push = lambda _: clock.at(6)  # a task in hand is finished
    second, third = harness.fit(2), harness.fit(3)
    work(daemon, 4)
    assert [task for task, _ in harness.link.pushed] == [first, second]
    assert harness.link.pause_reasons[3:] == [PauseReason.SCHEDULE] * 3
    assert list(harness.link.tasks) == [third]
    assert harness.declined() == []


def test_a_task_that_comes_too_late_is_left_alone(opened: Opened, clock: Clock) -> None:
    """The hours ended while the daemon waited for it."""
    harness, daemon = opened(NIGHTS)
    clock.at(5)
    work(daemon, 1)
    give, task = harness.link.next_task, harness.fit(1)

    def late(run: str, wait_s: float) -> Task | Wait | Finished:
        clock.at(6)
        return give(run, wait_s)

    harness.link.next_task = late  # type: ignore[method-assign]
    assert daemon.step(0.0) == Wait(0.0)
    daemon.step(0.0)
    assert (harness.link.pushed, harness.link.pause_reasons) == ([], [PauseReason.NONE, PauseReason.SCHEDULE])
    assert harness.declined() == []
    assert task not in harness.link.tasks


def test_both_have_to_be_fulfilled(opened: Opened, approvals: Approvals, clock: Clock) -> None:
    harness, daemon = opened({**NIGHTS, "approval": "manual"})
    work(daemon, 2)
    clock.at(21)
    work(daemon, 2)
    approvals.approve(approvals.offer("run"))
    work(daemon, 1)
    assert harness.link.pause_reasons == [*[PauseReason.SCHEDULE] * 2, *[PauseReason.APPROVAL] * 2, PauseReason.NONE]


def test_the_log_says_until_when() -> None:
    rules = AgentHarness(rules={**NIGHTS, "approval": "manual"}).agent()._site.policy.rules
    door = TaskGate(lambda: rules, None, lambda: datetime(2026, 6, 1, 12, 0, tzinfo=UTC))
    assert door.pause_reason(None) is PauseReason.SCHEDULE
    assert door.until(PauseReason.SCHEDULE) == "until 2026-06-01 20:00 UTC"
    assert "protofed client approve" in door.until(PauseReason.APPROVAL)
    assert door.until(PauseReason.NONE) == ""


# Files


def test_a_full_disk_stops_no_automatic_run(
    opened: Opened, approvals: Approvals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Assignment) -> None:
        raise OutOfSpaceError("no room")

    monkeypatch.setattr(approvals, "record_offer", full)
    for rules, pushes in ((RULES, 1), (MANUAL, 0)):
        harness = AgentHarness(rules=rules)
        made = harness.agent()
        daemon = Agent(made._site, harness.link, harness.now, harness.pauses.append, _door(made, approvals, Clock()))
        harness.fit(1)
        work(daemon, 2)
        assert len(harness.link.pushed) == pushes


# What the gate refuses is told


def test_what_the_gate_refuses_is_told_before_it_is_declined() -> None:
    harness, told = AgentHarness(rules={**RULES, "max_tensor_mb": 1e-5}), list[tuple[str, str]]()

    def refused(task: Task, why: PolicyViolationError) -> None:
        assert harness.declined() == []
        told.append((task.task_id, str(why)))

    daemon = harness.agent()
    task = harness.fit(1, first_model())
    work(Agent(daemon._site, harness.link, harness.now, harness.pauses.append, on_refusal=refused), 1)
    assert told == [(task.task_id, "body/linear1.bias of 0.0 MB is above this site's max_tensor_mb = 1e-05")]
    assert [task_id for task_id, _ in harness.declined()] == [task.task_id]


@pytest.mark.parametrize("approval", ["automatic", "manual"])
def test_a_denied_run_waits_until_it_is_approved(approval: str, approvals: Approvals, clock: Clock) -> None:
    rules = PolicyRules.model_validate({**RULES, "approval": approval})
    gate, run = TaskGate(lambda: rules, approvals, clock), Assignment("run", OTHER)
    gate.record_offer(run)
    approvals.approve(approvals.offer("run"))
    assert gate.pause_reason(run) is PauseReason.NONE
    approvals.deny(approvals.offer("run"))
    assert gate.pause_reason(run) is PauseReason.WITHDRAWN
    assert approvals.status("run", OTHER) is ApprovalStatus.DENIED
    assert gate.pause_reason(Assignment("next", OTHER)) is (
        PauseReason.NONE if approval == "automatic" else PauseReason.APPROVAL
    )
    approvals.approve(approvals.offer("run"))
    assert gate.pause_reason(run) is PauseReason.NONE


def test_an_edited_policy_counts_for_the_next_task_also_while_the_server_waits() -> None:
    harness = AgentHarness()
    daemon = harness.agent()
    rules = [daemon._site.policy.rules]
    daemon._site.read_policy = lambda: Policy(rules[-1])
    tasks = [harness.fit(1), harness.fit(2)]
    daemon.step(0.0)
    rules.append(rules[0].model_copy(update={"methods": frozenset({"fednh"})}))
    daemon.step(0.0)
    assert [task for task, _ in harness.link.pushed] == tasks[:1]
    assert harness.declined() == [(tasks[1].task_id, FailureReason.POLICY)]
    rules.append(rules[0])
    harness.fit(3)
    beats, given = len(harness.link.beats), harness.link.next_task

    def edited_meanwhile(run: str, wait_s: float) -> Task | Wait | Finished:
        rules.append(rules[0].model_copy(update={"methods": frozenset()}))
        return given(run, wait_s)

    harness.link.next_task = edited_meanwhile  # type: ignore[method-assign]
    assert isinstance(daemon.step(0.0), Wait)
    assert (len(harness.link.tried), len(harness.link.beats)) == (1, beats)  # it asks again, under the new policy


def test_while_its_policy_cannot_be_read_a_site_takes_no_task_and_says_so_once() -> None:
    harness = AgentHarness()
    daemon = harness.agent()
    policy, readable = daemon._site.policy, [True]

    def read() -> Policy:
        if not readable[-1]:
            raise ConfigError("policy.toml is not TOML")
        return policy

    daemon._site.read_policy = read
    daemon.step(0.0)
    harness.fit(1)
    readable.append(False)
    with capture_logs() as logs:
        for _ in range(3):
            assert isinstance(daemon.step(0.0), Wait)
    assert [line["why"] for line in logs if line["log_level"] == "error"] == ["policy.toml is not TOML"]
    assert harness.link.pause_reasons[-1] is PauseReason.POLICY
    assert not harness.link.tried
    readable.append(True)
    while not harness.link.pushed:
        daemon.step(0.0)
    assert harness.link.beats == []
