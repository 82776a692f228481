"""What a round costs in noisy mechanisms, and the recipe's `[plan.dp]`."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from protofed.common.config.plan import DpPlan, Plan
from protofed.common.dp import DpCost

DP = DpPlan(noise_multiplier=1.0, sampling_rate=0.1)


@pytest.mark.parametrize(
    ("epochs", "rate", "steps"), [(1, 1.0, 1), (2, 0.1, 20), (1, 0.3, 3), (1, 0.06, 17), (0, 0.5, 0), (3, 0.4, 8)]
)
def test_a_call_takes_as_many_steps_as_epochs_over_the_rate(epochs: int, rate: float, steps: int) -> None:
    assert DpPlan(noise_multiplier=1.0, sampling_rate=rate).steps(epochs) == steps


def test_a_rounds_steps_are_those_of_its_calls() -> None:
    assert DpCost(epochs=(5, 2), class_releases=2).steps(DP) == 70
    assert DpCost(epochs=()).steps(DP) == 0


def test_each_call_is_rounded_for_itself_as_train_does_it() -> None:
    rate = DpPlan(noise_multiplier=1.0, sampling_rate=0.3)
    assert DpCost(epochs=(1, 1)).steps(rate) == 6  # not round(2 / 0.3) = 7


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise_multiplier": 0.0, "sampling_rate": 0.1},
        {"noise_multiplier": 1.0, "sampling_rate": 0.0},
        {"noise_multiplier": 1.0, "sampling_rate": 1.1},
        {"noise_multiplier": 1.0, "sampling_rate": 0.1, "max_unit_norm": 0.0},
        {"noise_multiplier": 1.0, "sampling_rate": 0.1, "class_noise_multiplier": 0.0},
        {"noise_multiplier": 1.0, "sampling_rate": 0.1, "min_noisy_count": -1.0},
        {"noise_multiplier": 1.0},
        {"sampling_rate": 0.1},
    ],
)
def test_a_plan_without_noise_or_rate_is_no_plan(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Plan.model_validate({"dp": wrong})


def test_without_the_table_there_is_no_noise() -> None:
    assert Plan().dp is None
