"""A trainer gives the scores of a round once, and a run goes back no further than the policy says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.client.base_checks.test_judge import CHECKED, SEEDS_OWN, scaled
from tests.support.scripted_server import RULES, RUN, AgentHarness, first_model, work

from protofed.client.state.disk_store import DiskStore
from protofed.client.state.store import SiteState
from protofed.common.errors import FailureReason, PolicyViolationError
from protofed.common.protocol.messages import Role, Task, TaskKind


def harness(folder: Path, most: int, **options: Any) -> AgentHarness:
    rules = {**RULES, "limits": {**RULES["limits"], "max_rollback_rounds": most}}
    return AgentHarness(DiskStore(folder), {**RUN, "rounds": 9}, rules, **options)


def test_a_round_is_scored_once_also_after_a_restart(tmp_path: Path) -> None:
    site = AgentHarness(DiskStore(tmp_path), rules=dict(CHECKED))
    site.fit(1, SEEDS_OWN)
    asked = site.score(1, scaled(1.1))
    work(site.agent(), 2)
    assert len(site.link.scores) == 1
    site.restart(tmp_path)
    other = site.offer(TaskKind.SCORE, 1, scaled(1.2), "another-task")
    site.link.tasks.append(asked)  # the server did not hear the answer
    work(site.agent(), 2)
    assert site.declined() == [(other.task_id, FailureReason.POLICY)]
    assert len(site.link.scores) == 2


def test_a_round_is_scored_once_whatever_model_the_server_names_under_the_same_task(tmp_path: Path) -> None:
    site = AgentHarness(DiskStore(tmp_path), rules=dict(CHECKED))
    site.fit(1, SEEDS_OWN)
    asked = site.score(1, scaled(1.1))
    site.offer(TaskKind.SCORE, 1, scaled(1.2), asked.task_id)
    work(site.agent(), 3)
    assert len(site.link.scores) == 1
    assert site.declined() == [(asked.task_id, FailureReason.POLICY)]


def test_one_task_of_many_models_is_many_of_a_day(tmp_path: Path) -> None:
    rules = {**RULES, "limits": {**RULES["limits"], "tasks_per_day": 2}}
    site = AgentHarness(DiskStore(tmp_path), {**RUN, "rounds": 9}, rules)
    for number in (1, 2, 3):
        site.fit(number, first_model(number), "same")
    daemon = site.agent()
    for _ in range(3):
        # As after a kill: a daemon has forgotten it, and a repetition clears it.
        daemon._work.tools.guard._settled.clear()
        daemon.step(0.0)
    assert [task.round for task, _ in site.link.pushed] == [1, 2]
    assert site.declined() == [("same", FailureReason.POLICY)]


def test_a_trainer_that_took_no_part_yet_is_asked_in_vain_and_an_evaluator_is_not() -> None:
    for role, answers in ((Role.TRAINER, 0), (Role.EVALUATOR, 1)):
        site = AgentHarness(rules=dict(CHECKED), roles=frozenset({role}))
        site.score(1, scaled(1.1))
        work(site.agent(), 1)
        assert len(site.link.scores) == answers


@pytest.mark.parametrize(("back_to", "done"), [(4, True), (3, True), (2, False), (1, False)])
def test_a_run_goes_back_as_far_as_the_policy_says(tmp_path: Path, back_to: int, *, done: bool) -> None:
    site = harness(tmp_path, most=2)
    daemon = site.agent()
    refused: list[tuple[Task, PolicyViolationError]] = []
    daemon._work.tools.on_refusal = lambda task, violation: refused.append((task, violation))
    for number in (1, 2, 3, 4):
        site.fit(number)
    back = site.fit(back_to, task_id="back")
    work(daemon, 5)
    assert (site.declined() == []) == done
    if not done:
        assert [(task.task_id, reason) for task, reason in refused] == [(back.task_id, refused[0][1])]
        assert "limits.max_rollback_rounds" in str(refused[0][1])
        assert site.store.last_counted("run", 9).round == 4


def test_going_back_twice_is_measured_from_the_newest_round(tmp_path: Path) -> None:
    site = harness(tmp_path, most=2)
    daemon = site.agent()
    for number in (1, 2, 3, 4):
        site.fit(number)
    site.fit(3, task_id="back")
    further = site.fit(2, task_id="further")
    work(daemon, 6)
    assert site.declined() == [(further.task_id, FailureReason.POLICY)]


@pytest.mark.parametrize(("stands", "starts_from"), [(None, 4), (4, 4), (3, 3), (2, 2), (1, None), (0, None)])
def test_a_fit_passes_over_as_much_as_the_policy_says(
    tmp_path: Path, stands: int | None, starts_from: int | None
) -> None:
    """A server that says of every update that it does not stand would choose what old memory a site starts from."""
    site = harness(tmp_path, most=2)
    site.store.retain(0)
    daemon, asked = site.agent(), list[int]()
    for number in (1, 2, 3, 4):
        site.fit(number)
    work(daemon, 4)
    last_counted = site.store.last_counted

    def recorded(run: str, before: int) -> SiteState:
        asked.append((state := last_counted(run, before)).round)
        return state

    site.store.last_counted = recorded  # type: ignore[method-assign]
    fit = site.fit(5)
    site.link.tasks[-1] = replace(fit, state_round=stands)
    work(daemon, 1)
    assert asked[:1] == [starts_from] * (starts_from is not None)
    assert site.declined() == ([] if starts_from is not None else [(fit.task_id, FailureReason.POLICY)])
    assert site.store.newest_counted("run") == (4 if starts_from is None else 5)
