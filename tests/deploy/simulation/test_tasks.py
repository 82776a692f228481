"""Runs of each task end to end, in one process: they learn, and what does not fit a task is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.task_recipes import OWN, TASKS, task_recipe

from protofed.client.method import client_methods
from protofed.client.policy.policy import Policy
from protofed.common import plugins
from protofed.common.errors import ConfigError, DataError
from protofed.common.plugins import ONE_CLASS
from protofed.deploy import shipped
from protofed.deploy.figures.finished_run import open_run
from protofed.deploy.report.report import document
from protofed.deploy.simulation.simulation import everything, simulation
from protofed.server.operator.run_record import run_record

JUDGED = {
    "multi-label": ("global.auroc", 0.7, 1.0),
    "regression": ("global.mae", 0.0, 2.3),
    "own": ("global.near", 0.2, 1.0),
}


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_allowed", {OWN})


@pytest.mark.parametrize("policy", ["open", "standard"])
@pytest.mark.parametrize("task", ["multi-label", "regression"])
def test_no_score_of_a_sites_own_test_set_leaves_under_a_shipped_policy(task: str, policy: str) -> None:
    """An area under the curve of few images tells how many have the finding."""
    secure = policy != "open"
    federation = {"min_sites": 3, "quorum": 3, "secure": secure}
    plan = {"epochs": 4, "batch_size": 16, "lr": 0.05, "momentum": 0.9}
    run = task_recipe(task, "ditto", federation=federation, plan=plan, data={"local_test_fraction": 0.3})
    with simulation(run, policy=Policy.read(shipped.folder("policies") / f"{policy}.toml")) as running:
        running.go()
        assert running.runs.failed == []
        scores, aggregated = running.ledger.scores(run.name), running.ledger.score_sums(run.name, 3)
        taken = [row for row in running.ledger.updates(run.name, 3) if row.counts]
    named = {name for of_round in scores.values() for site in of_round.values() for name in site}
    assert {name.partition(".")[0] for name in named} <= {"global", "loss"}
    assert not {name for name in named if ".local." in name}
    assert JUDGED[task][0] in named
    assert not any(aggregated.values())
    assert len(taken) == 3


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_a_run_learns_and_its_report_says_what_it_learnt(task: str, secure: bool) -> None:
    more: dict[str, Any] = {"federation": {"secure": True, "min_sites": 3, "quorum": 3}} if secure else {}
    run = task_recipe(task, **more)
    name, least, most = JUDGED[task]
    with simulation(run) as running:
        running.go()
        scores = running.ledger.scores(run.name, 3)[3]
        record = run_record(running.ledger, running.blobs, run.name)
    (value,) = (of[name] for of in scores.values() if name in of)
    assert least < value < most
    told = document(record)
    assert not {"classes", "groups", "calibration"} & {section.key for section in told.sections}
    assert any(f"for the task {run.task.name}" in line for line in told.sections[0].lead)


@pytest.mark.parametrize("task", ["multi-label", "regression"])
def test_a_run_with_noise_learns(task: str) -> None:
    dp = {"noise_multiplier": 0.5, "max_unit_norm": 1.0, "sampling_rate": 0.2}
    plan = {"epochs": 4, "batch_size": 32, "lr": 0.2, "momentum": 0.9, "dp": dp}
    run = task_recipe(task, plan=plan, federation={"secure": True, "min_sites": 3, "quorum": 3})
    name, least, most = JUDGED[task]
    with simulation(run) as running:
        running.go()
        assert running.runs.failed == []
        scores = running.ledger.scores(run.name, 3)[3]
    (value,) = (of[name] for of in scores.values() if name in of)
    assert least < value < most


@pytest.mark.parametrize("method", sorted(client_methods))
def test_a_method_of_classes_is_refused_by_the_server_and_all_others_are_not(method: str) -> None:
    half, run = client_methods.build(method, {}), task_recipe("multi-label", method)
    if half.declares.tasks != ONE_CLASS:
        with simulation(run):
            return
    with pytest.raises(ConfigError, match=f"method '{method}' is defined for the task classification"), simulation(run):
        pass


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"plan": {"loss": "balanced-softmax"}}, "plan.loss is for task.name"),
        ({"plan": {"sampling": "class-balanced"}}, "plan.sampling is for task.name"),
        ({"evaluation": {"frequency_groups": True}}, "evaluation.frequency_groups is for task.name"),
        ({"evaluation": {"clinical": True}}, "evaluation.clinical is for task.name"),
        ({"federation": {"best_by": "global.accuracy"}}, "expected a score that can judge a round"),
        ({"task": {"name": "multi-label", "unknown": "ones"}}, "unknown"),
        ({"task": {"name": "regression", "range": [0, 1]}}, "expected 1 for the task regression"),
        ({"task": {"name": "classification"}, "classes": 1, "class_names": ()}, "expected 2 or more"),
    ],
)
def test_what_says_nothing_of_a_task_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        task_recipe("multi-label", **more)


def test_a_task_of_another_package_that_lacks_the_judging_score_is_refused_where_the_run_begins() -> None:
    run = task_recipe("own", federation={"best_by": "global.nearest"})
    with pytest.raises(ConfigError, match=r"did you mean 'global\.near'"), simulation(run):
        pass


def test_sites_decline_a_task_that_their_policy_does_not_name_and_say_which() -> None:
    run = task_recipe("multi-label", rounds=1, federation={"min_sites": 3, "quorum": 3, "max_attempts": 1})
    named = everything(run).rules
    for tasks, declined in (({"multi-label"}, False), ({"classification", "regression"}, True)):
        rules = named.model_copy(update={"tasks": frozenset(tasks)})
        with simulation(run, policy=Policy(rules)) as running:
            running.go()
            assert bool(running.runs.failed) is declined
            violations = set(running.violations.values())
        said = "the task 'multi-label' is not in this site's policy (tasks: classification, regression)"
        assert violations == ({said} if declined else set())


@pytest.mark.parametrize("data", [{"long_tail": 0.1}, {"auxiliary_per_class": 2}])
def test_images_are_chosen_by_their_class_where_there_are_classes(data: dict[str, Any]) -> None:
    with (
        pytest.raises(DataError, match="the run's task is no classification"),
        simulation(task_recipe("multi-label", data=data)),
    ):
        pass


def test_figures_of_another_task_are_refused(tmp_path: Path) -> None:
    run = task_recipe("multi-label", rounds=1)
    with simulation(run, tmp_path / "state") as running:
        running.go()
    with pytest.raises(ConfigError, match="figures are of classes alone"):
        open_run(tmp_path / "state", run)
