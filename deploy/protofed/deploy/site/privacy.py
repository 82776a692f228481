"""The privacy of runs with noise: what a run costs a site, by its recipe alone, and what a site has spent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from protofed.client.method import ClientMethod, client_methods, compute_dp_cost
from protofed.client.policy.dp_accountant import (
    DELTA,
    Events,
    NoisySums,
    epsilon,
    noise_for,
    repeated,
    round_events,
    rounds_within,
)
from protofed.client.policy.rules import PrivacyBudget
from protofed.client.state.dp_ledger import Spent
from protofed.common.config.recipe import Recipe
from protofed.common.errors import count

MAX_MEANT = 10.0  # an epsilon above it promises next to nothing


@dataclass(frozen=True)
class PrivacyPlan:
    """The privacy that a run costs, if the site takes part in all rounds.

    Attributes:
        events: the noisy mechanisms of a round.
        delta: at which epsilon is given.
        epsilon: of all rounds by themselves.
        rounds: of the recipe.
        budget: the policy's; None: it has none, or no policy was given, and then the rest is None, too.
        spent: epsilon of what the site has spent before; None: not known, and taken as nothing.
        allowed: how many rounds the budget allows beside what is spent.
        noise: the least noise_multiplier that keeps all rounds in the budget; None: the recipe's does, or none would.
        shared_by: sites whose noise together it is, and the least of a sum; None: each site adds all of the noise.
    """

    events: Events
    delta: float
    epsilon: float
    rounds: int
    budget: PrivacyBudget | None = None
    spent: float | None = None
    allowed: int | None = None
    noise: float | None = None
    shared_by: tuple[int, int] | None = None

    @property
    def enough(self) -> bool:
        """Whether the budget allows all rounds, or there is none."""
        return self.allowed is None or self.allowed >= self.rounds


def planned(recipe: Recipe, delta: float = DELTA) -> PrivacyPlan | None:
    """What a run costs at a delta, from its recipe alone; None: it has no noise.

    Raises:
        ConfigError: the recipe's method is unknown, or does not work with noise.
    """
    return privacy_plan(recipe, client_methods.build(recipe.method.name, recipe.method.options), delta=delta)


def privacy_plan(
    recipe: Recipe,
    half: ClientMethod,
    budget: PrivacyBudget | None = None,
    spent: Spent | None = None,
    delta: float = DELTA,
) -> PrivacyPlan | None:
    """What a run costs, beside a site's budget and what it has spent; None: the run has no noise.

    Args:
        half: the client algorithm of the run's method.
        delta: where there is no budget, which names one.

    Raises:
        ConfigError: as of `compute_dp_cost`.
    """
    if (dp := recipe.plan.dp) is None:
        return None
    cost = compute_dp_cost(half, recipe.method.name, recipe.plan)
    events = round_events(dp, cost)
    at = delta if budget is None else budget.delta
    before = () if spent is None else spent.events()
    shared_by = None if dp.shared_by is None else (dp.shared_by, recipe.federation.sum_group)
    whole = PrivacyPlan(events, at, epsilon(repeated(events, recipe.rounds), at), recipe.rounds, shared_by=shared_by)
    if budget is None:
        return whole
    allowed = rounds_within(before, events, budget.epsilon, at)
    noise = None if allowed >= recipe.rounds else noise_for(before, dp, cost, recipe.rounds, budget.epsilon, at)
    known = None if spent is None else epsilon(before, at)
    return replace(whole, budget=budget, spent=known, allowed=allowed, noise=noise)


def lines(plan: PrivacyPlan) -> Iterator[str]:
    """The plan in sentences."""
    yield f"A round has {' and '.join(map(_sums, plan.events))}."
    yield (
        f"All {plan.rounds} rounds cost epsilon {plan.epsilon:.3g} at delta {plan.delta:g}. This follows from the "
        "recipe alone and is the same for every site: it does not tell how many images or patients a site has."
    )
    if plan.shared_by is not None:
        honest, least = plan.shared_by
        yield (
            f"This is the noise of {honest} sites together, in each sum over {least} sites or more. It holds while at "
            f"most {least - honest} of them work with the server."
        )
    if plan.epsilon > MAX_MEANT:
        yield f"An epsilon above {MAX_MEANT:g} promises next to nothing: more noise, fewer rounds or smaller samples."
    if plan.budget is None or plan.allowed is None:
        return
    spent = "what is spent before is not known here (--state)" if plan.spent is None else f"{plan.spent:.3g} is spent"
    yield f"This site's budget is {plan.budget.epsilon:g} for each {plan.budget.unit}, over all runs; {spent}."
    if plan.enough:
        yield "The budget allows all rounds of this run."
        return
    yield f"The budget allows {plan.allowed} of {plan.rounds} rounds. Then the run goes on without this site."
    if plan.noise is not None:
        yield f"With plan.dp.noise_multiplier = {plan.noise:g} it would allow all of them."
    else:
        yield "No noise on the steps would let it allow all of them: fewer rounds, or more class_noise_multiplier."


def _sums(event: NoisySums) -> str:
    over = "all units" if event.sampling_rate == 1 else f"samples of {event.sampling_rate:.3g} of the units"
    noise = f"noise of {event.noise_multiplier:g} times the most that one adds"
    return f"{count(event.count, 'sum')} over {over}, with {noise}"


def plain(plan: PrivacyPlan | None) -> dict[str, Any] | None:
    """The plan for `--json`."""
    if plan is None:
        return None
    return {
        "per_round": [[event.sampling_rate, event.noise_multiplier, event.count] for event in plan.events],
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "rounds": plan.rounds,
        "budget": None if plan.budget is None else plan.budget.epsilon,
        "unit": None if plan.budget is None else plan.budget.unit,
        "spent": plan.spent,
        "rounds_allowed": plan.allowed,
        "noise_multiplier_needed": plan.noise,
        "shared_by": None if plan.shared_by is None else plan.shared_by[0],
        "colluders_withstood": None if plan.shared_by is None else plan.shared_by[1] - plan.shared_by[0],
    }


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
    """All that was spent. Its attributes are keys of `protofed client budget --json`.

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
