"""Noise: normal, of the secret's stream, the same after a restart and of no other fit; and what a fit may spend.

Noise that the sites of a secure aggregation share: it adds up on the ring, and rounding it costs nothing.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.client.training.dp import DpContext, DpNoise, NoiseShare, fit_seed, share_std
from protofed.common.config.recipe import DpCost, DpPlan, Plan
from protofed.common.errors import FailureReason, SecureAggregationError, TaskFailedError
from protofed.common.payload import Part, Payload, Update, describe
from protofed.common.secure_aggregation.linear_form import ClassRows, FixedPoint, SumForm, SumLayout

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
    first, second = normal("a")[:-1].chunk(2)
    assert abs((first * second).mean().item()) < 6 * STANDARD_ERROR


def test_equal_paths_give_equal_numbers_and_no_two_fits_have_the_same_noise() -> None:
    assert torch.equal(normal(1, 2, "noise"), normal(1, 2, "noise"))
    others = [normal(1, 2, "units"), normal(2, 1, "noise"), normal("1", 2, "noise"), normal(12, "noise")]
    others.append(normal(1, 2, "noise", seed=b"another"))
    for drawn in others:
        assert not (drawn == normal(1, 2, "noise")).any()
    shaped = DpNoise(b"seed").normal((3, 5), 1, device=CPU)
    assert torch.equal(shaped.flatten(), normal(1, count=15))
    assert DpNoise(b"s").normal((), 1, device=CPU).shape == ()
    secret = bytes(range(32))
    assert fit_seed(secret, "run", 1, "base") == fit_seed(secret, "run", 1, "base")
    seeds = {fit_seed(secret, *some) for some in (("run", 1, "other"), ("run", 2, "base"), ("run1", "base"))}
    seeds |= {fit_seed(bytes(32), "run", 1, "base"), fit_seed(secret, "run", 1, "base")}
    assert len(seeds) == 5


@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
def test_each_unit_is_drawn_with_the_rate(rate: float) -> None:
    drawn = DpNoise(b"seed").chosen(COUNT, rate, 1, "units")
    assert abs(drawn.double().mean().item() - rate) <= 4 * STANDARD_ERROR * math.sqrt(rate * (1 - rate))


def test_more_steps_or_class_releases_than_declared_fail_before_the_first_of_them() -> None:
    plan, cost = DpPlan(noise_multiplier=1.0, sampling_rate=0.5), DpCost(epochs=(1, 2), class_releases=2)
    dp = DpContext(plan, cost, DpNoise(b"seed"))
    dp.begin_steps(2)
    dp.begin_steps(4)
    assert [dp.begin_release(), dp.begin_release()] == [1, 2]
    for beyond in (lambda: dp.begin_steps(1), dp.begin_release):
        with pytest.raises(TaskFailedError) as caught:
            beyond()
        assert caught.value.reason is FailureReason.INTERNAL


POINT = FixedPoint(1024.0, 40, 50)
FORM = SumForm((Part.BODY, Part.HEAD))
MODEL: Payload = {
    Part.BODY: {"w": np.linspace(-1, 1, 6000, dtype=np.float32).reshape(60, 100), "steps": np.array(3)},
    Part.HEAD: {"b": np.full(2000, 0.25, dtype=np.float32)},
}
LAYOUT = SumLayout.of(FORM, describe(MODEL), MODEL)


def share_of(site: int, std: float = 0.1) -> NoiseShare:
    return NoiseShare(DpNoise(bytes([site])), std)


def words(payload: Payload = MODEL) -> NDArray[np.uint64]:
    found: NDArray[np.uint64] = LAYOUT.words(Update("ann", payload), POINT)
    return found


def test_shares_add_up_to_the_noise_of_the_sum_and_depend_on_nothing_that_they_hide() -> None:
    noisy = [share_of(site).on_words(LAYOUT, words(), 40) for site in range(4)]
    sums = LAYOUT.named(POINT.decoded(sum(noisy[1:], noisy[0]) - np.uint64(4) * words()))
    for key in ("mean/body/w", "mean/head/b"):
        assert sums[key].std() == pytest.approx(0.1 * 2, rel=0.05)
        assert abs(sums[key].mean()) < 5 * 0.2 / math.sqrt(sums[key].size)
    assert sums["weight"] == 0.0, "how many sites there are is public"
    assert len({noise.tobytes() for noise in noisy}) == 4
    other = {part: {name: array * 0 for name, array in tensors.items()} for part, tensors in MODEL.items()}
    most = np.full(LAYOUT.size, 2**63 - 1, np.uint64)
    drawn = {(share_of(1).on_words(LAYOUT, some, 40) - some).tobytes() for some in (words(), words(other), most)}
    assert len(drawn) == 1


def test_a_share_is_the_same_in_a_simulation_and_refused_where_it_does_not_hide_rows() -> None:
    update = share_of(1).on_update(MODEL)
    assert update[Part.BODY]["steps"] == 3
    noisy = LAYOUT.named(POINT.decoded(share_of(1).on_words(LAYOUT, words(), 40)))
    for key, array in (("mean/body/w", update[Part.BODY]["w"]), ("mean/head/b", update[Part.HEAD]["b"])):
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, noisy[key], rtol=0, atol=1e-7)
    form = SumForm((Part.BODY,), rows=ClassRows(Part.PROTOTYPES, (Part.BODY, "w")))
    layout = SumLayout.of(form, describe(MODEL), MODEL)
    with pytest.raises(SecureAggregationError):
        share_of(1).on_words(layout, np.zeros(layout.size, np.uint64), 40)


def test_its_size_is_that_of_the_step_and_of_what_float32_rounds() -> None:
    dp = DpPlan(noise_multiplier=2.0, max_unit_norm=3.0, sampling_rate=0.1, shared_by=4)
    plan = Plan(batch_size=8, lr=0.5, schedule="exponential", lr_decay=0.5, dp=dp)
    exact = 2.0 * (0.25 * 3.0 / 8) / math.sqrt(4)  # in round 2 the learning rate is 0.25
    small, large = (share_std(plan, 2, 10, {Part.BODY: {"w": np.full(100, size, np.float32)}}) for size in (0, 1e4))
    assert exact < small < 1.02 * exact
    assert large - small == pytest.approx(2.0 * 2.0**-21 * 1e5 / 2)
    assert share_std(plan.model_copy(update={"dp": None}), 2, 10, MODEL) == 0.0
    assert share_std(plan.model_copy(update={"dp": dp.model_copy(update={"shared_by": None})}), 2, 10, MODEL) == 0.0


@pytest.mark.parametrize("centre", [0.0, 0.3])
@pytest.mark.parametrize("moved", [1.0, 1.4])
def test_a_sum_of_rounded_noise_is_as_private_as_normal_noise(centre: float, moved: float) -> None:
    """Privacy profiles by numbers, of three sites with a std of 1.5 steps each; recipes have 1024 or more."""
    sites, std = 3, 1.5
    here, there = (rounded_sum(centre + by, std, sites) for by in (0.0, moved))
    for epsilon in (0.0, 0.5, 1.0, 2.0):
        for one, other in ((here, there), (there, here)):
            rounded = np.maximum(one - math.exp(epsilon) * other, 0).sum()
            assert rounded <= of_normal(epsilon, moved / (std * math.sqrt(sites))) + 1e-9
    assert np.maximum(here - there, 0).sum() > 0.5 * of_normal(0.0, moved / (std * math.sqrt(sites)))


def rounded_sum(centre: float, std: float, sites: int) -> NDArray[np.float64]:
    """Chances of each integer from -60 to 60 of a sum: of `centre`, which one site has, and the noise of all."""
    whole: NDArray[np.float64] = rounded(centre, std)
    for _ in range(sites - 1):
        whole = np.convolve(whole, rounded(0.0, std), mode="same")
    return whole


def rounded(centre: float, std: float) -> NDArray[np.float64]:
    """Chances of each integer from -60 to 60 of a normal number of this mean, rounded."""
    noise = NormalDist(centre, std)
    edges = np.array([noise.cdf(k - 0.5) for k in range(-60, 62)])
    found: NDArray[np.float64] = np.diff(edges)
    return found


def of_normal(epsilon: float, distance: float) -> float:
    """Delta of the Gaussian mechanism (Balle and Wang, ICML 2018, theorem 8), at a sensitivity in stds."""
    cdf = NormalDist().cdf
    return cdf(distance / 2 - epsilon / distance) - math.exp(epsilon) * cdf(-distance / 2 - epsilon / distance)
