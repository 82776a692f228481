"""Approving a run at a site: its plan first, then this very recipe and no other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.support.command_line import Answers, called

from protofed.client.policy.approval import FOLDER, Approvals, ApprovalStatus
from protofed.common.config.recipe import Recipe
from protofed.common.protocol.messages import Assignment
from protofed.deploy import shipped
from protofed.deploy.cli import client

Run = Callable[..., tuple[int, str, str]]
POLICIES = shipped.folder("policies")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command's exit code and what it printed, asked on a terminal of 100 columns."""
    monkeypatch.setattr(client.console, "width", 100)  # whatever COLUMNS was when it was made
    return partial(called, capfd, "client")


@pytest.fixture
def recipe(recipe_of: Callable[..., Recipe]) -> Recipe:
    return recipe_of("fednh", federation={"min_sites": 3, "secure": True})


@pytest.fixture
def approvals(tmp_path: Path, recipe: Recipe) -> Approvals:
    """Of a site whose server offered it one run."""
    made = Approvals(tmp_path / FOLDER)
    made.record_offer(Assignment(recipe.name, recipe.wire(), min_cohort=3))
    return made


def test_a_run_is_approved_after_its_plan_was_shown(
    run: Run, approvals: Approvals, recipe: Recipe, tmp_path: Path
) -> None:
    standard = POLICIES / "standard.toml"
    code, out, _ = run("approve", recipe.name, "--state", tmp_path, "--policy", standard, "--yes")
    assert code == 0
    shown = (
        f"{recipe.name}: method fednh",
        "What the site masks and sends",
        "fewer than 10",
        "standard.toml lets the site take part",
    )
    places = [" ".join(out.split()).index(text) for text in (*shown, f"approved: run {recipe.name}")]
    assert places == sorted(places)
    assert max(map(len, out.splitlines())) <= 100
    assert approvals.status(recipe.name, recipe.wire()) is ApprovalStatus.APPROVED
    assert approvals.status(recipe.name, recipe.wire() + " ") is ApprovalStatus.CHANGED


def test_without_a_yes_nothing_is_approved(
    run: Run, approvals: Approvals, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("approve", recipe.name, "--state", tmp_path)[0] == 78, "nobody can be asked"
    monkeypatch.setattr(sys, "stdin", Answers("n\n"))
    assert run("approve", recipe.name, "--state", tmp_path)[0] == 1
    assert approvals.status(recipe.name, recipe.wire()) is ApprovalStatus.WAITING


def test_a_run_that_the_policy_refuses_is_not_approved(
    run: Run, tmp_path: Path, recipe_of: Callable[..., Recipe]
) -> None:
    recipe, approvals = recipe_of("fedavg"), Approvals(tmp_path / FOLDER)
    approvals.record_offer(Assignment(recipe.name, recipe.wire(), min_cohort=3))
    strict = POLICIES / "strict.toml"
    code, out, _ = run("approve", recipe.name, "--state", tmp_path, "--policy", strict, "--yes")
    assert code == 77
    assert "strict.toml refuses this run" in out
    code, out, _ = run("approve", recipe.name, "--state", tmp_path, "--policy", "strict", "--yes")
    assert (code, "policy strict refuses this run" in out) == (77, True)
    assert approvals.status(recipe.name, recipe.wire()) is ApprovalStatus.WAITING


def test_runs_are_listed_with_how_they_stand(run: Run, approvals: Approvals, recipe: Recipe, tmp_path: Path) -> None:
    def status() -> str:
        (row,) = json.loads(run("runs", "--state", tmp_path, "--json")[1])
        assert (row["run"], row["method"], row["model"], row["rounds"]) == (recipe.name, "fednh", "digits-cnn", 3)
        return str(row["approval"])

    assert status() == "waiting"
    approvals.approve(approvals.offer(recipe.name))
    assert status() == "approved"
    approvals.record_offer(Assignment(recipe.name, recipe.wire() + " "))
    assert status() == "changed since it was approved"
    assert recipe.name in run("runs", "--state", tmp_path)[1]


def test_what_a_server_says_is_shown_and_not_obeyed(run: Run, tmp_path: Path, recipe: Recipe) -> None:
    approvals = Approvals(tmp_path / FOLDER)
    told = json.loads(recipe.wire())
    told["method"]["name"] = "[bold]\x1b[2Jfednh[/bold]"
    approvals.record_offer(Assignment("styled", json.dumps(told)))
    approvals.record_offer(Assignment("broken", "{"))
    approvals.record_offer(Assignment("with-data", json.dumps({**told, "data": {"source": "digits"}})))
    code, out, _ = run("runs", "--state", tmp_path)
    assert code == 0
    assert "\x1b[2J" not in out
    rows = {row["run"]: row for row in json.loads(run("runs", "--state", tmp_path, "--json")[1])}
    assert rows["styled"]["method"] == "[bold][2Jfednh[/bold]"
    for name in ("broken", "with-data"):
        assert rows[name]["approval"].startswith("cannot be used: ")
        assert run("approve", name, "--state", tmp_path, "--yes")[0] == 78
    assert run("approve", "styled", "--state", tmp_path, "--yes")[0] == 78


@pytest.mark.parametrize("name", ["another", "../small-fednh", ""])
def test_a_run_that_was_not_offered_is_no_run(name: str, run: Run, approvals: Approvals, tmp_path: Path) -> None:
    code, _, err = run("approve", name, "--state", tmp_path, "--yes")
    assert code == 78
    assert "small-fednh" in err or "is no id" in err
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_what_a_run_asks_is_shown_beside_the_limits_and_a_broken_one_is_named(
    run: Run, tmp_path: Path, recipe: Recipe
) -> None:
    approvals, standard = Approvals(tmp_path / FOLDER), POLICIES / "standard.toml"
    greedy = json.loads(recipe.wire())
    greedy["plan"] |= {"lr": 1e5, "batch_size": 1_000_000}
    approvals.record_offer(Assignment(recipe.name, json.dumps(greedy), min_cohort=1))
    code, out, _ = run("approve", recipe.name, "--state", tmp_path, "--policy", standard, "--yes")
    assert code == 77
    for rule in ("limits.lr", "limits.batches", "limits.min_cohort"):
        assert f"({rule})" in " ".join(out.split())
    assert approvals.status(recipe.name, json.dumps(greedy)) is ApprovalStatus.WAITING
    (row,) = json.loads(run("runs", "--state", tmp_path, "--json")[1])
    assert (row["cohort"], row["plan"]) == (1, "1 epochs of 1000000, lr 100000")
    assert row["asked"].keys() >= {"method", "model", "input", "plan", "optimizer", "learning rate", "rounds", "cohort"}


def test_a_cohort_that_shrinks_or_was_not_announced_is_offered_anew(
    run: Run, approvals: Approvals, recipe: Recipe, tmp_path: Path
) -> None:
    assert approvals.offer(recipe.name).min_cohort == 3
    approvals.record_offer(Assignment(recipe.name, recipe.wire(), min_cohort=1))
    assert approvals.offer(recipe.name).min_cohort == 1
    (file,) = (tmp_path / FOLDER).glob("*.seen.json")
    table = json.loads(file.read_text())
    del table["min_cohort"]
    file.write_text(json.dumps(table))
    assert approvals.offer(recipe.name).min_cohort == 1
