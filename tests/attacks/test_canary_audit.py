"""The audit finds most of what a fit without noise tells, and of one with noise no more than its epsilon."""

from __future__ import annotations

import math

import pytest
from tests.attacks.canary_audit import Audit, audit

DELTA = 1e-5


def test_bounds_by_hand() -> None:
    # All of 100 right: (e^eps / (1 + e^eps))^100 = 0.05
    likely = 0.05 ** (1 / 100)
    assert Audit(100, 100).epsilon(0.0) == pytest.approx(math.log(likely / (1 - likely)), abs=1e-6)
    assert Audit(50, 100).epsilon(0.0) == 0.0  # as by chance
    assert 0 < Audit(70, 100).epsilon(0.0) < Audit(90, 100).epsilon(0.0)
    assert Audit(90, 100).epsilon(DELTA) < Audit(90, 100).epsilon(0.0)  # some may be told by delta's chance


def test_without_noise_worth_the_name_membership_is_told() -> None:
    found = audit(noise_multiplier=1e-6, sampling_rate=1.0)
    assert found.epsilon(DELTA) > 2.0


# Noise, rate, and the epsilon of the fit at DELTA by the PLD accountant (dp-accounting 0.6.0), rounded up.
SETTINGS = [(0.6, 1.0, 8.1), (1.0, 1.0, 4.4), (3.0, 1.0, 1.28), (0.6, 0.2, 9.9), (1.0, 0.2, 3.9)]


@pytest.mark.parametrize(("noise", "rate", "epsilon"), SETTINGS)
def test_with_noise_the_lower_bound_stays_below_epsilon(noise: float, rate: float, epsilon: float) -> None:
    assert max(audit(noise, rate, seed).epsilon(DELTA) for seed in range(3)) < epsilon


def test_noise_of_a_tenth_would_be_found_out() -> None:
    assert audit(0.3, 1.0).epsilon(DELTA) > 1.28  # what noise of 3.0 promises
