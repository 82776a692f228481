"""A recipe's `[plan]`: schedules worked out, keys that nothing uses, and what an older daemon is not told."""

from __future__ import annotations

from typing import Any

import pytest
from tests.common.config.test_recipe import sound

from protofed.common.config.plan import Plan
from protofed.common.config.recipe import Recipe, parse_json
from protofed.common.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "needed"),
    [({"tau": 2.0}, 'plan.loss = "logit-adjustment"'), ({"lr_steps": [0.1]}, 'plan.schedule = "step"')],
)
def test_a_key_of_the_plan_that_nothing_uses_is_refused(keys: dict[str, Any], needed: str) -> None:
    with pytest.raises(ConfigError, match=needed):
        sound(plan=keys)


def test_a_rate_falls_after_the_rounds_whose_share_is_named_whatever_a_product_of_floats_is() -> None:
    plan = Plan(schedule="step", lr=1.0, lr_decay=0.5, lr_steps=(0.55, 0.07))
    assert 0.55 * 100 > 55
    assert 0.07 * 100 > 7
    assert [plan.learning_rate(number, 100) for number in (1, 7, 8, 55, 56, 100)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert [plan.learning_rate(number, 3) for number in (1, 2, 3)] == [1, 0.5, 0.25]  # .21 and 1.65 rounds


@pytest.mark.parametrize("warmup", [0, 1, 2, 7, 30])
@pytest.mark.parametrize("schedule", ["constant", "exponential", "step", "cosine"])
def test_the_lowest_rate_is_that_of_no_other_round(schedule: Any, warmup: int) -> None:
    for decay in (1.0, 0.9, 0.01):
        plan = Plan(schedule=schedule, lr=0.4, lr_decay=decay, warmup_rounds=warmup)
        rates = [plan.learning_rate(number, 10) for number in range(1, 11)]
        assert plan.lowest_rate(10) == min(rates)
        assert max(rates) <= 0.4
        after = rates[max(warmup, 1) - 1 :]
        assert after == sorted(after, reverse=True)


PLAN_KEYS = {
    "loss": "balanced-softmax",
    "sampling": "class-balanced",
    "buffers": "local",
    "warmup_rounds": 3,
}


def test_keys_of_the_plan_reach_the_wire_and_the_fingerprint() -> None:
    for key, value in PLAN_KEYS.items():
        used = sound(plan={key: value})
        assert parse_json(used.wire(), Recipe, "wire").plan == used.plan != sound().plan
        assert used.fingerprint() != sound().fingerprint()
