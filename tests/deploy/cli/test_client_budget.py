"""`client budget`: what a site has spent of its privacy."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.support.command_line import called

from protofed.client.policy.dp_accountant import NoisySums, epsilon
from protofed.client.state.dp_ledger import FILE, DpLedger
from protofed.common.codec import Digest
from protofed.common.errors import ConfigError, StateError
from protofed.common.protocol.messages import Task, TaskKind
from protofed.deploy.cli import client

Run = Callable[..., tuple[int, str, str]]
ROUND = (NoisySums(0.1, 1.5, 10),)
POLICY = """
methods = ["fedavg"]
parts = ["body"]
dp = { epsilon = 8.0, delta = 1e-6, unit = "patient" }
"""


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command's exit code and what it printed, on a terminal of 100 columns."""
    monkeypatch.setattr(client.console, "width", 100)
    return partial(called, capfd, "client", "budget")


@pytest.fixture
def spending(tmp_path: Path) -> DpLedger:
    """Of a site that has started two fits of a round of one run, and one of another."""
    ledger = DpLedger(tmp_path / FILE)
    for name, task_id in (("digits", "a"), ("digits", "b"), ("lesions", "c")):
        ledger.spend(Task(TaskKind.FIT, name, 1, task_id, Digest("a" * 64), 1, 60.0), "noise", ROUND)
    return ledger


@pytest.mark.usefixtures("spending")
def test_spends_are_added_by_run_beside_the_policys_budget(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("--state", tmp_path, "--json")
    found = json.loads(out)
    assert code == 0
    assert [(one["run"], one["fits"], one["rounds"]) for one in found["runs"]] == [("digits", 2, 1), ("lesions", 1, 1)]
    assert [one["epsilon"] for one in found["runs"]] == [epsilon(ROUND * 2, 1e-5), epsilon(ROUND, 1e-5)]
    assert (found["epsilon"], found["delta"]) == (epsilon(ROUND * 3, 1e-5), 1e-5)
    assert (found["budget"], found["torn"]) == (None, 0)
    assert "digits" in run("--state", tmp_path)[1]
    (tmp_path / "policy.toml").write_text(POLICY)
    found = json.loads(run("--state", tmp_path, "--policy", tmp_path / "policy.toml", "--json")[1])
    assert (found["budget"], found["unit"], found["delta"]) == (8.0, "patient", 1e-6)
    assert found["epsilon"] == epsilon(ROUND * 3, 1e-6)


def test_nothing_spent_is_zero_and_beyond_all_use_no_number(run: Run, tmp_path: Path) -> None:
    assert (run("--state", tmp_path)[0], json.loads(run("--state", tmp_path, "--json")[1])["epsilon"]) == (0, 0.0)
    task = Task(TaskKind.FIT, "digits", 1, "a", Digest("a" * 64), 1, 60.0)
    DpLedger(tmp_path / FILE).spend(task, "noise", [NoisySums(1.0, 1e-4, 1)])
    assert json.loads(run("--state", tmp_path, "--json")[1])["epsilon"] is None
    assert run("--state", tmp_path)[0] == 0


@pytest.mark.usefixtures("spending")
def test_half_a_line_is_counted_and_told(run: Run, tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes() + b'{"hash":"')
    found = json.loads(run("--state", tmp_path, "--json")[1])
    assert (found["torn"], found["epsilon"]) == (1, epsilon(ROUND * 4, 1e-5))


def test_a_damaged_ledger_and_a_wrong_folder_are_errors(run: Run, tmp_path: Path) -> None:
    assert run("--state", tmp_path / "none")[0] == ConfigError.exit_code
    (tmp_path / FILE).write_text("not ours\n")
    assert run("--state", tmp_path)[0] == StateError.exit_code
