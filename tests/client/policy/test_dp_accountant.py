"""The epsilon of noisy mechanisms, beside Opacus' accountants and closed forms.

`golden/dp_epsilon_opacus.json` was made once with Opacus 1.6.0, for each row of it by

    accountant = PRVAccountant()            # and RDPAccountant()
    accountant.history = [(noise, rate, count) for rate, noise, count in row["events"]]
    accountant.get_epsilon(row["delta"], eps_error=0.002)   # without eps_error of the RDP one
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from protofed.client.policy.dp_accountant import NoisySums, epsilon, merged, noise_for, round_events, rounds_within
from protofed.common.config.recipe import DpCost, DpPlan

GRID: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden/dp_epsilon_opacus.json").read_text())
assert len(GRID) == 20
PLAN = DpPlan(noise_multiplier=1.5, sampling_rate=0.1, class_noise_multiplier=10.0)
COST = DpCost((1,), class_releases=1)


def gaussian_epsilon(noise: float, delta: float) -> float:
    """Of one Gaussian mechanism, exactly: Balle and Wang, ICML 2018, theorem 8."""

    def excess(eps: float) -> float:
        return float(
            norm.cdf(1 / (2 * noise) - eps * noise) - math.exp(eps) * norm.cdf(-1 / (2 * noise) - eps * noise) - delta
        )

    return float(brentq(excess, 0, 100))


@pytest.mark.parametrize("row", GRID, ids=lambda row: "+".join("-".join(map(str, event)) for event in row["events"]))
def test_epsilon_is_that_of_opacus(row: dict[str, Any]) -> None:
    ours = epsilon([NoisySums(*event) for event in row["events"]], row["delta"])
    # Opacus gives the upper end of its error bars, which is eps_error = 0.002 above its estimate and at most twice that
    # above the truth; ours is an upper bound by less than 0.001.
    assert row["prv"] - 0.004 < ours < row["prv"] + 0.001
    assert ours < row["rdp"]


@pytest.mark.parametrize("noise", [0.8, 2.0, 20.0])
@pytest.mark.parametrize("count", [1, 16])
def test_epsilon_of_unsampled_sums_is_the_closed_form(noise: float, count: int) -> None:
    exact = gaussian_epsilon(noise / math.sqrt(count), 1e-5)
    assert exact <= epsilon([NoisySums(1.0, noise, count)], 1e-5) <= exact + 1e-3


def test_more_costs_more_from_nothing_to_an_epsilon_without_meaning() -> None:
    one = NoisySums(0.1, 1.5, 10)
    costs = [epsilon([], 1e-5), epsilon([one], 1e-5), epsilon([one, one], 1e-5)]
    assert costs[0] == 0.0
    assert costs == sorted(set(costs))
    assert epsilon([one, one], 1e-5) == epsilon([NoisySums(0.1, 1.5, 20)], 1e-5)
    assert epsilon([one], 1e-7) > epsilon([one], 1e-5)
    for events in (NoisySums(1.0, 1e-4, 1), NoisySums(1.0, 1.0, 10**9)):
        assert epsilon([events], 1e-5) == math.inf
    assert 20_000 < epsilon([NoisySums(0.5, 0.3, 10_000)], 1e-5) < 30_000
    assert rounds_within([NoisySums(0.5, 0.3, 10_000)], round_events(PLAN, COST), 8.0, 1e-5) == 0  # it is spent


def test_the_mechanisms_of_a_round_follow_from_plan_and_method_and_are_merged() -> None:
    assert round_events(PLAN, COST) == (NoisySums(0.1, 1.5, 10), NoisySums(1.0, 10.0, 1))
    assert round_events(PLAN, DpCost((2, 3))) == (NoisySums(0.1, 1.5, 50),)
    with pytest.raises(ValueError, match="class_noise_multiplier"):
        round_events(PLAN.model_copy(update={"class_noise_multiplier": None}), COST)
    assert merged([NoisySums(0.2, 1.0, 2), NoisySums(0.1, 1.0, 1), NoisySums(0.2, 1.0, 3), NoisySums(0.3, 1.0, 0)]) == (
        NoisySums(0.1, 1.0, 1),
        NoisySums(0.2, 1.0, 5),
    )


@pytest.mark.parametrize("spent", [(), (NoisySums(0.1, 1.0, 40),)])
def test_the_rounds_of_a_budget_fit_and_one_more_does_not(spent: tuple[NoisySums, ...]) -> None:
    each = round_events(PLAN, COST)
    rounds = rounds_within(spent, each, 8.0, 1e-5)
    assert rounds > 0
    assert epsilon([*spent, *each * rounds], 1e-5) <= 8.0 < epsilon([*spent, *each * (rounds + 1)], 1e-5)


def test_the_noise_for_a_budget_is_the_least_of_three_digits_or_none() -> None:
    noise = noise_for((), PLAN, COST, 100, 8.0, 1e-5)
    assert noise is not None

    def cost(noise: float) -> float:
        events = round_events(PLAN.model_copy(update={"noise_multiplier": noise}), COST)
        return epsilon(events * 100, 1e-5)

    assert cost(noise) <= 8.0 < cost(noise * 0.99)
    plan = PLAN.model_copy(update={"class_noise_multiplier": 1.0})
    assert noise_for((), plan, COST, 100, 8.0, 1e-5) is None
    assert noise_for([NoisySums(0.1, 0.3, 100)], plan, DpCost((1,)), 10, 8.0, 1e-5) is None
