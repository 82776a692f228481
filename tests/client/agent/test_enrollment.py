"""A site that waits for its approval or its hours is there, says why, and takes no task."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.support.scripted_server import RULES, RUN, AgentHarness, first_model, work

from protofed.client.agent.agent import PAUSED_RETRY_S, Agent, TaskGate
from protofed.client.policy.approval import FOLDER, MAX_OFFERED, Approvals, ApprovalStatus
from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import PolicyRules
from protofed.client.state.disk_store import DiskStore
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, FailureReason, NotEnrolledError, OutOfSpaceError, PolicyViolationError
from protofed.common.protocol.messages import MAX_RECIPE_BYTES, Assignment, Finished, PauseReason, Task, Wait

MANUAL = {**RULES, "approval": "manual"}
NIGHTS = {**RULES, "schedule": [{"from": "20:00", "until": "06:00"}]}
OTHER = Recipe.model_validate({**RUN, "rounds": 2}).wire()


class Clock:
    """Monday, noon."""

    def __init__(self) -> None:
        self.now = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def at(self, hour: int) -> None:
        self.now = self.now.replace(hour=hour)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def approvals(tmp_path: Path, clock: Clock) -> Approvals:
    return Approvals(tmp_path / "state" / FOLDER, clock)


@pytest.fixture
def opened(tmp_path: Path, approvals: Approvals, clock: Clock) -> Callable[..., tuple[AgentHarness, Agent]]:
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


def test_a_run_waits_until_it_is_approved(
    opened: Callable[..., tuple[AgentHarness, Agent]], approvals: Approvals
) -> None:
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
def approved(opened: Callable[..., tuple[AgentHarness, Agent]], approvals: Approvals, tmp_path: Path) -> AgentHarness:
    """A site that needs approvals and has one for its run, to be started again."""
    harness, daemon = opened(MANUAL)
    work(daemon, 1)
    approvals.approve(approvals.offer("run"))
    harness.restart(tmp_path / "state")
    return harness


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


def test_a_restarted_daemon_that_finds_no_run_says_at_once_that_the_next_one_needs_an_approval(
    approved: AgentHarness,
) -> None:
    again, told, over = approved.agent(), list[PauseReason](), Finished("nothing is queued", last=True)
    approved.link.enroll = lambda reason, _wait_s: told.append(reason) or over  # type: ignore[method-assign, misc, assignment, func-returns-value]
    assert [again.step(0.0), again.step(0.0)] == [Wait(0.0), over]
    assert told == [PauseReason.NONE, PauseReason.APPROVAL]


@pytest.mark.parametrize("decision", ["none", "denied", "withdrawn", "changed", "paused"])
def test_a_restarted_daemon_presumes_no_run_that_is_not_approved(
    decision: str,
    opened: Callable[..., tuple[AgentHarness, Agent]],
    approvals: Approvals,
    tmp_path: Path,
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


def test_an_approval_is_of_one_recipe(opened: Callable[..., tuple[AgentHarness, Agent]], approvals: Approvals) -> None:
    harness, daemon = opened(MANUAL)
    work(daemon, 1)
    approvals.approve(approvals.offer("run"))
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


def test_the_next_run_is_not_known_yet_and_so_not_approved(
    opened: Callable[..., tuple[AgentHarness, Agent]], approvals: Approvals
) -> None:
    harness, daemon = opened(MANUAL)
    work(daemon, 1)
    approvals.approve(approvals.offer("run"))
    harness.link.tasks.append(Finished("completed", last=False))
    work(daemon, 1)
    harness.link.run = "next"
    work(daemon, 2)
    assert harness.link.pause_reasons == [
        PauseReason.APPROVAL,
        PauseReason.NONE,
        PauseReason.APPROVAL,
        PauseReason.APPROVAL,
    ]
    assert {offer.run for offer in approvals.offers()} == {"run", "next"}


def test_an_approval_that_is_taken_back_ends_at_the_next_task(
    opened: Callable[..., tuple[AgentHarness, Agent]], approvals: Approvals, tmp_path: Path
) -> None:
    harness, daemon = opened(MANUAL)
    work(daemon, 1)
    approvals.approve(approvals.offer("run"))
    work(daemon, 2)
    (tmp_path / "state" / FOLDER / "run.json").unlink()
    harness.fit(1)
    work(daemon, 2)
    assert harness.link.pushed == []
    assert harness.link.pause_reasons[-1] is PauseReason.APPROVAL


def test_what_was_computed_is_not_handed_in_while_the_site_waits(
    opened: Callable[..., tuple[AgentHarness, Agent]], tmp_path: Path
) -> None:
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


def test_a_server_that_has_no_run_is_asked_again_as_before(opened: Callable[..., tuple[AgentHarness, Agent]]) -> None:
    harness, daemon = opened(MANUAL)
    over = Finished("nothing is queued", last=True)
    harness.link.enroll = lambda *_: over  # type: ignore[method-assign]
    assert [daemon.step(0.0), daemon.step(0.0)] == [over, over]
    assert harness.pauses == []


def test_only_a_daemon_that_was_answered_waits_for_a_run(opened: Callable[..., tuple[AgentHarness, Agent]]) -> None:
    """Whether the server is there at all is known at once."""
    harness, daemon = opened(MANUAL)
    over, waits = Finished("nothing is queued", last=True), list[float]()
    harness.link.enroll = lambda _reason, wait_s: waits.append(wait_s) or over  # type: ignore[method-assign, misc, assignment, func-returns-value]
    for run_wait_s in (20.0, 20.0, 0.0):
        daemon.step(20.0, run_wait_s)
    assert waits == [0.0, 20.0, 0.0]


# Schedule


def test_tasks_are_taken_in_the_sites_hours(opened: Callable[..., tuple[AgentHarness, Agent]], clock: Clock) -> None:
    harness, daemon = opened(NIGHTS)
    first = harness.fit(1)
    work(daemon, 2)
    assert harness.link.pause_reasons == [PauseReason.SCHEDULE] * 2
    clock.at(20)
    work(daemon, 1)
    assert harness.link.pause_reasons[2:] == [PauseReason.NONE]
    clock.at(5)
    second = harness.fit(2)
    work(daemon, 2)
    clock.at(6)
    third = harness.fit(3)
    work(daemon, 3)
    assert [task for task, _ in harness.link.pushed] == [first, second]
    assert harness.link.pause_reasons[3:] == [PauseReason.SCHEDULE] * 3
    assert list(harness.link.tasks) == [third]
    assert harness.declined() == []


def test_a_task_in_hand_is_finished(opened: Callable[..., tuple[AgentHarness, Agent]], clock: Clock) -> None:
    harness, daemon = opened(NIGHTS)
    clock.at(5)
    harness.link.before_push = lambda _: clock.at(6)
    tasks = [harness.fit(1), harness.fit(2)]
    work(daemon, 3)
    assert [task for task, _ in harness.link.pushed] == tasks[:1]
    assert harness.link.pause_reasons == [PauseReason.NONE, PauseReason.SCHEDULE, PauseReason.SCHEDULE]


def test_a_task_that_comes_too_late_is_left_alone(
    opened: Callable[..., tuple[AgentHarness, Agent]], clock: Clock
) -> None:
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


def test_both_have_to_be_fulfilled(
    opened: Callable[..., tuple[AgentHarness, Agent]], approvals: Approvals, clock: Clock
) -> None:
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


def test_what_is_offered_is_written_down_once(approvals: Approvals, clock: Clock) -> None:
    offered = Assignment("run", OTHER)
    approvals.record_offer(offered)
    first = approvals.offer("run")
    assert (first.recipe, first.at) == (OTHER, "2026-06-01T12:00:00Z")
    clock.now += timedelta(hours=1)
    approvals.record_offer(offered)
    assert approvals.offers() == [first]
    approvals.record_offer(replace(offered, recipe=OTHER + " "))
    (second,) = approvals.offers()
    assert second.digest != first.digest
    assert second.at == "2026-06-01T13:00:00Z"


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"run": "run", "digest": "x", "at": ""}', b"\xff\xfe"])
def test_an_approval_that_cannot_be_read_is_none(text: bytes, approvals: Approvals, tmp_path: Path) -> None:
    offered = Assignment("run", OTHER)
    approvals.record_offer(offered)
    approvals.approve(approvals.offer("run"))
    path = tmp_path / "state" / FOLDER / "run.json"
    assert json.loads(path.read_text())["digest"] == approvals.offer("run").digest
    path.write_bytes(text)
    assert approvals.status("run", OTHER) is not ApprovalStatus.APPROVED


def test_an_approval_of_another_run_is_none_for_this_one(approvals: Approvals, tmp_path: Path) -> None:
    approvals.record_offer(Assignment("one", OTHER))
    approvals.approve(approvals.offer("one"))
    folder = tmp_path / "state" / FOLDER
    os.rename(folder / "one.json", folder / "two.json")
    assert approvals.status("two", OTHER) is ApprovalStatus.CHANGED


def test_a_server_cannot_fill_the_disk_with_runs(approvals: Approvals, clock: Clock, tmp_path: Path) -> None:
    for number in range(MAX_OFFERED + 3):
        clock.now += timedelta(seconds=1)
        approvals.record_offer(Assignment(f"run-{number}", "{}"))
        approvals.approve_by_policy(Assignment(f"run-{number}", "{}"), "policy.toml", "a" * 64)
        approvals.record_task(Assignment(f"run-{number}", "{}"))
    assert len(approvals.offers()) == MAX_OFFERED
    assert len(list((tmp_path / "state" / FOLDER).iterdir())) == 3 * MAX_OFFERED
    assert approvals.offers()[-1].run == f"run-{MAX_OFFERED + 2}"
    approvals.record_offer(Assignment("large", "x" * (MAX_RECIPE_BYTES + 1)))
    assert not (tmp_path / "state" / FOLDER / "large.seen.json").exists()


@pytest.mark.parametrize("run", ["../run", "a/b", "", ".hidden"])
def test_a_name_that_is_no_id_touches_no_file(run: str, approvals: Approvals, tmp_path: Path) -> None:
    for call in (lambda: approvals.record_offer(Assignment(run, OTHER)), lambda: approvals.offer(run)):
        with pytest.raises(ConfigError, match="is no id"):
            call()
    assert list(tmp_path.rglob("*")) == []


def test_a_run_that_was_never_offered_cannot_be_approved(approvals: Approvals) -> None:
    with pytest.raises(ConfigError, match="was offered no run yet"):
        approvals.offer("run")
    approvals.record_offer(Assignment("other-run", OTHER))
    with pytest.raises(ConfigError, match="'other-run'"):
        approvals.offer("othr-run")


def test_a_full_disk_stops_no_run_that_needs_no_approval(
    opened: Callable[..., tuple[AgentHarness, Agent]], approvals: Approvals, monkeypatch: pytest.MonkeyPatch
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
def test_a_denied_run_waits_whatever_the_policy_until_it_is_approved(
    approval: str, approvals: Approvals, clock: Clock
) -> None:
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


def test_an_edited_policy_counts_for_the_next_task() -> None:
    harness = AgentHarness()
    daemon = harness.agent()
    rules = [daemon._site.policy.rules]
    daemon._site.read_policy = lambda: Policy(rules[-1])
    tasks = [harness.fit(1), harness.fit(2)]
    daemon.step(0.0)
    assert [task.task_id for task, _ in harness.link.pushed] == [tasks[0].task_id]
    rules.append(rules[0].model_copy(update={"methods": frozenset({"fednh"})}))
    daemon.step(0.0)
    assert len(harness.link.pushed) == 1
    assert harness.declined() == [(tasks[1].task_id, FailureReason.POLICY)]


def test_an_edit_while_the_server_waits_counts_for_the_task_that_it_gives() -> None:
    harness = AgentHarness()
    daemon = harness.agent()
    rules = [daemon._site.policy.rules]
    daemon._site.read_policy = lambda: Policy(rules[-1])
    daemon.step(0.0)  # enrolled
    harness.fit(1)
    given = harness.link.next_task

    def edited_meanwhile(run: str, wait_s: float) -> Task | Wait | Finished:
        rules.append(rules[0].model_copy(update={"methods": frozenset()}))
        return given(run, wait_s)

    harness.link.next_task = edited_meanwhile  # type: ignore[method-assign]
    assert isinstance(daemon.step(0.0), Wait)
    assert (harness.link.tried, harness.link.beats) == ([], [])  # it asks for the task again, under the new policy


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
