"""Noise: normal, of the secret's stream, the same after a restart and of no other fit; and what a fit may spend."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from protofed.client.training.dp import DpContext, DpNoise, fit_seed
from protofed.common.config.plan import DpPlan
from protofed.common.dp import DpCost
from protofed.common.errors import FailureReason, TaskFailedError

CPU = torch.device("cpu")
COUNT = 200_001  # odd: numbers are made in pairs
STANDARD_ERROR = 1 / math.sqrt(COUNT)


def normal(*path: str | int, seed: bytes = b"seed", count: int = COUNT) -> Tensor:
    return DpNoise(seed).normal((count,), *path, device=CPU)


def test_numbers_are_standard_normal() -> None:
    drawn = normal("a")
    assert drawn.dtype == torch.float64
    assert drawn.shape == (COUNT,)
    assert abs(drawn.mean().item()) < 4 * STANDARD_ERROR
    assert abs(drawn.square().mean().item() - 1) < 4 * STANDARD_ERROR * math.sqrt(2)
    assert abs(drawn.pow(4).mean().item() - 3) < 4 * STANDARD_ERROR * math.sqrt(96)
    for level in (-2.0, -1.0, 0.0, 1.0, 2.0):
        expected = 0.5 * math.erfc(-level / math.sqrt(2))
        assert abs((drawn <= level).double().mean().item() - expected) < 4 * STANDARD_ERROR / 2


def test_the_two_numbers_of_a_pair_are_not_correlated() -> None:
    first, second = normal("a")[:-1].chunk(2)
    assert abs((first * second).mean().item()) < 6 * STANDARD_ERROR


def test_equal_paths_give_equal_numbers_and_all_others_other_ones() -> None:
    assert torch.equal(normal(1, 2, "noise"), normal(1, 2, "noise"))
    others = [normal(1, 2, "units"), normal(2, 1, "noise"), normal("1", 2, "noise"), normal(12, "noise")]
    others.append(normal(1, 2, "noise", seed=b"another"))
    for drawn in others:
        assert not (drawn == normal(1, 2, "noise")).any()


def test_a_shape_is_filled_as_a_vector_is() -> None:
    assert torch.equal(
        DpNoise(b"s").normal((3, 5), 1, device=CPU).flatten(), DpNoise(b"s").normal((15,), 1, device=CPU)
    )
    assert DpNoise(b"s").normal((), 1, device=CPU).shape == ()


@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
def test_each_unit_is_drawn_with_the_rate(rate: float) -> None:
    drawn = DpNoise(b"seed").chosen(COUNT, rate, 1, "units")
    assert abs(drawn.double().mean().item() - rate) <= 4 * STANDARD_ERROR * math.sqrt(rate * (1 - rate))


def test_no_two_fits_have_the_same_noise() -> None:
    secret = bytes(range(32))
    assert fit_seed(secret, "run", 1, "base") == fit_seed(secret, "run", 1, "base")
    others = {fit_seed(secret, *some) for some in (("run", 1, "other"), ("run", 2, "base"), ("run1", "base"))}
    others |= {fit_seed(bytes(32), "run", 1, "base"), fit_seed(secret, "run", 1, "base")}
    assert len(others) == 5


def spent(cost: DpCost) -> DpContext:
    return DpContext(DpPlan(noise_multiplier=1.0, sampling_rate=0.5), cost, DpNoise(b"seed"))


def test_more_steps_than_declared_fail_before_the_first_of_them() -> None:
    dp = spent(DpCost(epochs=(1, 2)))
    dp.begin_steps(2)
    dp.begin_steps(4)
    with pytest.raises(TaskFailedError) as caught:
        dp.begin_steps(1)
    assert caught.value.reason is FailureReason.INTERNAL


def test_more_class_releases_than_declared_fail() -> None:
    dp = spent(DpCost(epochs=(1,), class_releases=2))
    assert [dp.begin_release(), dp.begin_release()] == [1, 2]
    with pytest.raises(TaskFailedError):
        dp.begin_release()
