"""A site's privacy budget: each fit with noise is counted before it begins, and none begins that would exceed it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from tests.support.scripted_server import RULES, RUN, AgentHarness, first_model, site_data, work
from tests.support.training_doubles import KilledError

from protofed.client.agent.agent import Agent
from protofed.client.agent.task_tools import Spending
from protofed.client.policy.dp_accountant import NoisySums, epsilon, rounds_within
from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import PolicyRules
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.dp_ledger import FILE, read
from protofed.common.errors import FailureReason, NotEnrolledError
from protofed.common.protocol.messages import PauseReason

NOISE = {"noise_multiplier": 2.0, "sampling_rate": 0.5, "max_unit_norm": 1.0}
NOISY = {**RUN, "plan": {**RUN["plan"], "epochs": 1, "dp": NOISE}}
ROUND = (NoisySums(0.5, 2.0, 2),)  # one epoch
DELTA = 1e-5
ROUNDS = 3
BUDGET = (epsilon(ROUND * ROUNDS, DELTA) + epsilon(ROUND * (ROUNDS + 1), DELTA)) / 2  # three rounds, and no fourth


def budgeted(**dp: Any) -> dict[str, Any]:
    return {**RULES, "dp": {"epsilon": BUDGET, "delta": DELTA, "unit": "image", **dp}}


@pytest.fixture
def harness(tmp_path: Path) -> AgentHarness:
    return AgentHarness(store=DiskStore(tmp_path), recipe={**NOISY, "rounds": 9}, rules=budgeted())


@pytest.fixture
def one_round(harness: AgentHarness) -> AgentHarness:
    harness.rules = budgeted(epsilon=epsilon(ROUND, DELTA) * 1.01)
    return harness


def spent(folder: Path) -> list[tuple[str, int]]:
    return [(spend.run, spend.round) for spend in read(folder / FILE).spends]


def test_rounds_are_counted_and_the_site_holds_where_the_budget_ends(harness: AgentHarness, tmp_path: Path) -> None:
    assert rounds_within((), ROUND, BUDGET, DELTA) == ROUNDS
    tasks = [harness.fit(number) for number in range(1, ROUNDS + 2)]
    with capture_logs() as lines:
        work(harness.agent(), ROUNDS + 3)
    assert [task for task, _ in harness.link.pushed] == tasks[:ROUNDS]
    assert spent(tmp_path) == [("run", number) for number in range(1, ROUNDS + 1)]
    assert read(tmp_path / FILE).events() == (NoisySums(0.5, 2.0, 2 * ROUNDS),)
    assert harness.link.pause_reasons == [PauseReason.NONE, *[PauseReason.BUDGET] * 3]
    assert list(harness.link.tasks) == tasks[ROUNDS:]  # not asked for
    assert harness.declined() == []
    assert harness.now.privacy == (epsilon(ROUND * ROUNDS, DELTA), BUDGET)
    assert [line["hold"] for line in lines if line["event"] == "this site takes no task yet"] == [PauseReason.BUDGET]


def test_the_budget_is_of_all_runs_and_outlives_the_daemon(harness: AgentHarness, tmp_path: Path) -> None:
    for number in range(1, ROUNDS):
        harness.fit(number)
    work(harness.agent(), ROUNDS)
    harness.restart(tmp_path)
    harness.recipe = {**harness.recipe, "name": "other"}
    harness.__post_init__()
    harness.link.run = "other"
    tasks = [harness.fit(1), harness.fit(2)]
    work(harness.agent(), 4)
    assert [task for task, _ in harness.link.pushed] == tasks[:1]
    assert spent(tmp_path) == [("run", 1), ("run", 2), ("other", 1)]
    assert harness.link.pause_reasons[-1] is PauseReason.BUDGET


def test_a_larger_budget_lets_the_site_go_on(harness: AgentHarness) -> None:
    tasks = [harness.fit(number) for number in range(1, ROUNDS + 2)]
    work(daemon := harness.agent(), ROUNDS + 2)
    assert len(harness.link.pushed) == ROUNDS
    policy = Policy(PolicyRules.model_validate(budgeted(epsilon=2 * BUDGET)))
    daemon._site.read_policy = lambda: policy
    work(daemon, 3)
    assert [task for task, _ in harness.link.pushed] == tasks


def test_a_run_too_costly_for_a_single_round_is_never_started(harness: AgentHarness, tmp_path: Path) -> None:
    harness.rules = budgeted(epsilon=epsilon(ROUND, DELTA) / 2)
    harness.fit(1)
    work(harness.agent(), 3)
    assert (harness.link.pushed, harness.link.calls["next_task"], spent(tmp_path)) == ([], 0, [])
    assert harness.link.pause_reasons == [PauseReason.NONE, PauseReason.BUDGET, PauseReason.BUDGET]


def test_a_fit_that_a_crash_ended_is_paid_for_once_and_goes_on(one_round: AgentHarness, tmp_path: Path) -> None:

    def killed(*_: object) -> None:
        raise KilledError

    task = one_round.fit(1)
    dies = one_round.agent()
    dies._site.fit = killed  # type: ignore[assignment]
    with pytest.raises(KilledError):
        work(dies, 1)
    assert spent(tmp_path) == [("run", 1)]
    one_round.restart(tmp_path)
    one_round.link.tasks.append(task)
    work(one_round.agent(), 3)
    assert [pushed for pushed, _ in one_round.link.pushed] == [task]
    assert spent(tmp_path) == [("run", 1)]
    assert one_round.link.pause_reasons[-1] is PauseReason.BUDGET


def test_the_last_update_is_handed_in_though_the_budget_is_spent(one_round: AgentHarness, tmp_path: Path) -> None:
    one_round.link.failing["push"] = [NotEnrolledError("the server was started anew")]
    task = one_round.fit(1)
    work(one_round.agent(), 4)
    assert [pushed for pushed, _ in one_round.link.pushed] == [task]
    assert spent(tmp_path) == [("run", 1)]
    assert one_round.link.pause_reasons[-1] is PauseReason.BUDGET


def test_a_task_that_comes_after_all_is_declined_once(one_round: AgentHarness, tmp_path: Path) -> None:
    """After a restart the fit that is paid for may go on; a server that gives another one in its place is refused."""
    task = one_round.fit(1)
    daemon = one_round.agent()
    one_round.link.failing["fetch"] = []
    work(daemon, 1)
    one_round.restart(tmp_path)
    (tmp_path / "run").rename(tmp_path / ".gone")  # as if its update had never counted
    other = one_round.fit(1, task_id="another")
    one_round.fit(2)
    work(one_round.agent(), 4)
    assert [pushed for pushed, _ in one_round.link.pushed] == [task]
    assert one_round.declined() == [(other.task_id, FailureReason.POLICY)]
    assert one_round.link.pause_reasons[-1] is PauseReason.BUDGET
    assert spent(tmp_path) == [("run", 1)]


def test_another_fit_is_paid_for_again_and_the_same_one_is_declined(harness: AgentHarness, tmp_path: Path) -> None:
    """It would have the same noise, and a server that has both updates the difference without."""
    task = harness.fit(1)
    work(daemon := harness.agent(), 1)
    twin = harness.fit(1, task_id="twin")
    work(daemon, 1)
    assert [pushed for pushed, _ in harness.link.pushed] == [task]
    assert harness.declined() == [(twin.task_id, FailureReason.POLICY)]
    assert spent(tmp_path) == [("run", 1)]
    harness.fit(1, first_model(seed=6), task_id="again")
    work(daemon, 1)
    assert spent(tmp_path) == [("run", 1), ("run", 1)]


def test_a_damaged_ledger_holds_the_site(harness: AgentHarness, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("nothing of ours\n")
    harness.fit(1)
    work(harness.agent(), 3)
    assert (harness.link.pushed, harness.link.calls["next_task"]) == ([], 0)
    assert harness.link.pause_reasons[-1] is PauseReason.BUDGET


def test_without_a_budget_fits_with_noise_are_counted_all_the_same(harness: AgentHarness, tmp_path: Path) -> None:
    harness.rules = dict(RULES)
    for number in range(1, ROUNDS + 2):
        harness.fit(number)
    work(harness.agent(), ROUNDS + 2)
    assert len(harness.link.pushed) == ROUNDS + 1
    assert len(spent(tmp_path)) == ROUNDS + 1
    assert harness.now.privacy == (epsilon(ROUND * (ROUNDS + 1), DELTA), None)


def test_a_run_without_noise_costs_nothing_and_a_budget_refuses_it(harness: AgentHarness, tmp_path: Path) -> None:
    harness.recipe, harness.rules = dict(RUN), dict(RULES)
    harness.__post_init__()
    harness.fit(1)
    work(harness.agent(), 1)
    assert (len(harness.link.pushed), spent(tmp_path), harness.now.privacy) == (1, [], None)
    harness.rules = budgeted()
    harness.fit(2)
    work(harness.agent(), 1)
    assert len(harness.link.pushed) == 1
    assert harness.declined() == [("n-fit-2", FailureReason.POLICY)]


@pytest.mark.parametrize(("units", "pushed"), [(None, 0), (torch.arange(12) // 3, 1)])
def test_a_budget_for_patients_needs_groups(harness: AgentHarness, units: torch.Tensor | None, pushed: int) -> None:
    data = replace(site_data(), train=replace(site_data().train, units=units))
    harness.rules, harness.load_data = budgeted(unit="patient"), lambda _: data
    harness.fit(1)
    work(harness.agent(), 1)
    assert len(harness.link.pushed) == pushed
    assert len(harness.declined()) == 1 - pushed


def test_no_loss_and_no_own_score_leaves_a_run_with_noise(harness: AgentHarness, tmp_path: Path) -> None:
    harness.rules = {**RULES, "example_count": True}  # no budget: the recipe's noise decides
    harness.fit(1)
    work(daemon := harness.agent(), 1)
    ((_, released),) = harness.link.pushed
    assert (released.metrics, released.weight) == ({}, None)
    harness.score(1)
    work(daemon, 1)
    assert spent(tmp_path) == [("run", 1)]  # scorings cost nothing
    assert harness.link.scores == [{}]
    assert harness.now.own_scores  # the site has them


def test_each_fit_is_told_before_it_begins(harness: AgentHarness) -> None:
    told: list[Spending] = []
    made = harness.agent()
    daemon = Agent(made._site, harness.link, harness.now, harness.pauses.append, on_spending=told.append)
    task = harness.fit(1)
    began: list[int] = []
    fit = daemon._site.fit

    def counting(*arguments: Any) -> Any:
        began.append(len(told))
        return fit(*arguments)

    daemon._site.fit = counting
    work(daemon, 1)
    assert began == [1]
    (facts,) = (dict(spending.facts()) for spending in told)
    assert facts.pop("epsilon") == pytest.approx(epsilon(ROUND, DELTA))
    at = {"run": "run", "round": 1, "task_id": task.task_id}
    assert facts.items() >= {**at, "events": [[0.5, 2.0, 2]], "delta": DELTA, "budget": BUDGET}.items()


def test_a_simulation_counts_nothing_and_holds_no_site(harness: AgentHarness, tmp_path: Path) -> None:
    harness.rules = budgeted(epsilon=epsilon(ROUND, DELTA) / 2)
    harness.fit(1)
    daemon = harness.agent()
    daemon._site.simulated = True
    work(daemon, 1)
    assert len(harness.link.pushed) == 1
    assert not (tmp_path / FILE).exists()
