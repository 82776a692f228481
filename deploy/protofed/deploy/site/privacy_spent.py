"""What a site has spent of its privacy: by run, and of all runs together beside its policy's budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

from protofed.client.policy.dp_accountant import epsilon
from protofed.client.policy.rules import PrivacyBudget
from protofed.client.state.dp_ledger import Spent


@dataclass(frozen=True)
class SpentByRun:
    """One run's part.

    Attributes:
        first, last: when its first and last fit was counted, UTC, RFC 3339.
        epsilon: of this run alone; None: beyond all use.
    """

    run: str
    fits: int
    rounds: int
    first: str
    last: str
    epsilon: float | None


@dataclass(frozen=True)
class PrivacySpent:
    """All of it. Its attributes are keys of `protofed client budget --json`.

    Attributes:
        torn: half-written lines of the ledger, each counted as the largest fit.
        epsilon: of all fits together; None: beyond all use.
        budget, unit: of the policy; None: it has none, or none was given.
    """

    runs: tuple[SpentByRun, ...]
    torn: int
    epsilon: float | None
    delta: float
    budget: float | None
    unit: str | None


def privacy_spent(spent: Spent, allowed: PrivacyBudget | None, delta: float) -> PrivacySpent:
    """Add a ledger up.

    Args:
        delta: at which epsilon is given where there is no budget, which names one.
    """
    delta = delta if allowed is None else allowed.delta
    runs = tuple(
        SpentByRun(
            run,
            len(spends),
            len({spend.round for spend in spends}),
            spends[0].at,
            spends[-1].at,
            _finite(epsilon([event for spend in spends for event in spend.noisy()], delta)),
        )
        for run, spends in spent.runs().items()
    )
    whole = _finite(epsilon(spent.events(), delta))
    budget, unit = (None, None) if allowed is None else (allowed.epsilon, str(allowed.unit))
    return PrivacySpent(runs, spent.torn, whole, delta, budget, unit)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
