"""How much privacy noisy mechanisms cost: epsilon at a delta, by the privacy loss distributions of `dp-accounting`.

Neighbours are two data sets that differ by one unit (a patient, or an image). All numbers are upper bounds, and none
depends on a site's data: of the same recipe and the same rounds everybody computes the same epsilon.

`dp-accounting` takes 2 s to import, and a composition up to one: both at the first call only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from protofed.common.config.recipe import DpCost, DpPlan

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

DELTA = 1e-5  # where no policy names one
# Width of the steps in which a privacy loss is counted: fine enough for 3 digits of any epsilon that is worth the name.
FINE, ROUGH = 1e-4, 2e-3
MAX_CELLS = 500_000  # of one distribution: more would take minutes, and belongs to an epsilon of thousands
HOPELESS = 1e6  # a mean privacy loss above it is not composed at all: its epsilon is given as infinite
MAX_ROUNDS = 10_000_000  # that are searched
LARGEST_NOISE = 1e4  # that is searched
NOISE_DIGITS = 3  # of a noise that is proposed, rounded up


@dataclass(frozen=True, order=True)
class NoisySums:
    """Equal Gaussian mechanisms: sums over a Poisson sample of the units, each adding a norm of 1 at most.

    Attributes:
        sampling_rate: q, the chance of each unit to be in a sample; 1: all are.
        noise_multiplier: std of the noise on each coordinate of the sum.
        count: how many there are.
    """

    sampling_rate: float
    noise_multiplier: float
    count: int


Events = tuple[NoisySums, ...]


def merged(events: Iterable[NoisySums]) -> Events:
    """The same mechanisms, equal ones in one entry, in a fixed order."""
    counts: Counter[tuple[float, float]] = Counter()
    for event in events:
        counts[event.sampling_rate, event.noise_multiplier] += event.count
    return tuple(NoisySums(*key, count) for key, count in sorted(counts.items()) if count)


def repeated(events: Iterable[NoisySums], times: int) -> Events:
    """Mechanisms, so many times."""
    return merged(NoisySums(event.sampling_rate, event.noise_multiplier, event.count * times) for event in events)


def round_events(dp: DpPlan, cost: DpCost) -> Events:
    """The mechanisms of one round of a method.

    Raises:
        ValueError: the method releases class sums, and the plan has no noise for them: nothing bounds such a round.
    """
    events = [NoisySums(dp.sampling_rate, dp.noise_multiplier, cost.steps(dp))]
    if cost.class_releases:
        if dp.class_noise_multiplier is None:
            raise ValueError("plan.dp.class_noise_multiplier is not set, and the method releases class sums")
        events.append(NoisySums(1.0, dp.class_noise_multiplier, cost.class_releases))
    return merged(events)


def epsilon(events: Iterable[NoisySums], delta: float) -> float:
    """The epsilon at `delta` of all these mechanisms together; 0 of none, infinite where it is beyond all use."""
    return _epsilon(merged(events), delta, FINE)


def rounds_within(spent: Iterable[NoisySums], per_round: Iterable[NoisySums], budget: float, delta: float) -> int:
    """How many rounds a budget allows beside what is spent; at most `MAX_ROUNDS`."""
    before, each = merged(spent), merged(per_round)

    def fits(rounds: int, width: float) -> bool:
        return _epsilon(merged([*before, *repeated(each, rounds)]), delta, width) <= budget

    rounds = _last(lambda n: fits(n, ROUGH), MAX_ROUNDS)
    return rounds + _last(lambda n: fits(rounds + n, FINE), MAX_ROUNDS - rounds)  # a rough bound is a little too large


def noise_for(
    spent: Iterable[NoisySums], dp: DpPlan, cost: DpCost, rounds: int, budget: float, delta: float
) -> float | None:
    """The least `noise_multiplier` of a run's steps that keeps a budget, rounded up; the rest of the plan stays.

    None: none is enough; what is spent, or class sums with their own noise, are too much by themselves.
    """
    before = merged(spent)

    def fits(noise: float, width: float) -> bool:
        events = round_events(dp.model_copy(update={"noise_multiplier": noise}), cost)
        return _epsilon(merged([*before, *repeated(events, rounds)]), delta, width) <= budget

    if not fits(LARGEST_NOISE, ROUGH):
        return None
    low, high = 0.0, 1.0
    while not fits(high, ROUGH):
        low, high = high, 2 * high
    while high - low > high * 10.0 ** -(NOISE_DIGITS + 1):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle, ROUGH) else (middle, high)
    return _rounded_up(high)


def _rounded_up(noise: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(noise)) - NOISE_DIGITS + 1)
    return float(f"{math.ceil(noise / unit) * unit:.{NOISE_DIGITS}g}")


def _last(fits: Callable[[int], bool], most: int) -> int:
    """The last number up to `most` that fits, where all before it do, too; 0 if 1 does not."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@lru_cache(maxsize=1024)
def _epsilon(events: Events, delta: float, width: float) -> float:
    if not events:
        return 0.0
    range_ = _range(events)
    if not range_ < HOPELESS:
        return math.inf
    width = max(width, range_ / MAX_CELLS)
    losses = [_losses(event, width) for event in events]
    whole = losses[0]
    for other in losses[1:]:
        whole = whole.compose(other)
    return float(whole.get_epsilon_for_delta(delta))


@lru_cache(maxsize=16)  # of runs that are over the losses stay the same; each takes up to 8 MB
def _losses(event: NoisySums, width: float) -> PrivacyLossDistribution:
    from dp_accounting.pld import privacy_loss_distribution as pld

    if event.sampling_rate == 1:  # n Gaussian mechanisms are one, with less noise
        noise = event.noise_multiplier / math.sqrt(event.count)
        return pld.from_gaussian_mechanism(noise, value_discretization_interval=width)
    one = pld.from_gaussian_mechanism(
        event.noise_multiplier, value_discretization_interval=width, sampling_prob=event.sampling_rate
    )
    return one.self_compose(event.count)


def _range(events: Events) -> float:
    """How large privacy losses get, roughly: ten standard deviations above the mean of all, or those of a single one.

    The mean loss of a sampled Gaussian is at most q / (2 sigma^2), by the convexity of the divergence in the sample.
    """
    mean = sum(event.count * event.sampling_rate / (2 * event.noise_multiplier**2) for event in events)
    single = max(1 / (2 * event.noise_multiplier**2) + 10 / event.noise_multiplier for event in events)
    return max(mean + 10 * math.sqrt(2 * mean), single)
