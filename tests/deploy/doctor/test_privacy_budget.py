"""What the doctor sees of a site's privacy budget: each state of its ledger is provoked."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from protofed.client.policy.dp_accountant import NoisySums
from protofed.client.policy.rules import PrivacyBudget
from protofed.client.state.dp_ledger import FILE, DpLedger
from protofed.common.codec import Digest
from protofed.common.errors import StateError
from protofed.common.protocol.messages import Task, TaskKind
from protofed.deploy.doctor.checks import CheckFailedError, CheckSkippedError
from protofed.deploy.doctor.client import ledger_message

BUDGET = PrivacyBudget(epsilon=4.0, delta=1e-5, unit="patient")


def spend(state: Path, fits: int = 2) -> Path:
    ledger = DpLedger(state / FILE)
    for number in range(1, fits + 1):
        task = Task(TaskKind.FIT, "run", number, f"task-{number}", Digest("a" * 64), 1, 60.0)
        ledger.spend(task, f"noise-{number}", [NoisySums(0.1, 1.5, 10)])
    return state / FILE


def refused(state: Path, budget: PrivacyBudget | None = BUDGET) -> str:
    with pytest.raises(CheckFailedError) as caught:
        ledger_message(state, budget)
    return caught.value.name


def test_where_nothing_has_noise_nothing_is_checked(tmp_path: Path) -> None:
    with pytest.raises(CheckSkippedError):
        ledger_message(tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_a_site_says_what_it_has_spent_and_of_how_much(tmp_path: Path) -> None:
    assert "epsilon 0 of 4 is spent" in ledger_message(tmp_path, BUDGET)
    assert list(tmp_path.iterdir()) == [], "nothing is written"
    before = spend(tmp_path).read_bytes()
    text = ledger_message(tmp_path, BUDGET)
    assert "of 4 is spent on each patient at delta 1e-05, by 2 fits; dp-accounting 0." in text
    assert "2 fits had noise" in ledger_message(tmp_path, None)
    assert (tmp_path / FILE).read_bytes() == before


def test_a_budget_that_is_spent_is_a_warning(tmp_path: Path) -> None:
    spend(tmp_path, 60)
    assert refused(tmp_path) == "privacy-budget-spent"


def test_half_a_line_is_said_and_counts(tmp_path: Path) -> None:
    path = spend(tmp_path)
    path.write_bytes(path.read_bytes() + b'{"hash":')
    assert "2 fits, and 1 half-written line" in ledger_message(tmp_path, BUDGET)


def test_a_damaged_ledger_is_reported_as_the_daemon_would(tmp_path: Path) -> None:
    path = spend(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"task-1", b"task-9"))
    with pytest.raises(StateError, match="line 1"):
        ledger_message(tmp_path, BUDGET)


def test_a_ledger_of_another_account_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spend(tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert refused(tmp_path) == "privacy-ledger-unusable"


def test_without_the_accountant_the_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spend(tmp_path)
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("dp_accounting"):
            raise ImportError("No module named 'dp_accounting'")
        return real(name, *rest, **named)

    from protofed.client.policy import dp_accountant

    dp_accountant._epsilon.cache_clear()
    dp_accountant._losses.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    assert refused(tmp_path) == "library-missing"
