"""What a site alone can tell of its privacy budget: the accountant, and the ledger of what is spent."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

from protofed.client.policy.rules import PrivacyBudget
from protofed.client.state.dp_ledger import FILE, Spent, read
from protofed.common.errors import count
from protofed.deploy.doctor.checks import CheckFailedError, CheckSkippedError

ACCOUNTANT = "dp-accounting"


def ledger_message(state: Path, budget: PrivacyBudget | None) -> str:
    """What is spent, and left.

    Args:
        state: the site's state folder.
        budget: the policy's; None: it has none, and a ledger alone is checked.

    Raises:
        CheckSkippedError: there is neither a budget nor a ledger.
        CheckFailedError: no epsilon can be computed, the ledger cannot be written, or all is spent.
        StateError: the ledger cannot be read, or is damaged.
    """
    path = state / FILE
    if budget is None and not path.exists():
        raise CheckSkippedError("the policy has no privacy budget (dp), and no fit had noise")
    spent = read(path)
    _check_writable(path)
    if budget is None:
        return f"the policy has none; {_fits(spent)} had noise"
    now = _epsilon(spent, budget.delta)
    text = (
        f"epsilon {now:.3g} of {budget.epsilon:g} is spent on each {budget.unit} at delta {budget.delta:g}, by "
        f"{_fits(spent)}; {ACCOUNTANT} {importlib.metadata.version(ACCOUNTANT)}"
    )
    if now >= budget.epsilon:
        raise CheckFailedError("privacy-budget-spent", text)
    return text


def _fits(spent: Spent) -> str:
    torn = f", and {count(spent.torn, 'half-written line')} that each count as the largest" if spent.torn else ""
    return f"{count(len(spent.spends), 'fit')}{torn}"


def _epsilon(spent: Spent, delta: float) -> float:
    from protofed.client.policy.dp_accountant import NoisySums, epsilon

    try:
        epsilon([NoisySums(0.1, 2.0, 1)], delta)  # of nothing it computes nothing, and would seem to be there
        return epsilon(spent.events(), delta)
    except ImportError as error:
        raise CheckFailedError("library-missing", f"{ACCOUNTANT} cannot be imported: {error}") from error


def _check_writable(path: Path) -> None:
    """Check that a fit could be counted, without writing: a line in the ledger is a fit."""
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise CheckFailedError("privacy-ledger-unusable", f"{path} cannot be written: give it to the daemon's account")
