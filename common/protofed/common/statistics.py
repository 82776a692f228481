"""Scores over sites: mean, standard deviation and worst."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from protofed.common.payload import SiteId


@dataclass(frozen=True)
class Spread:
    """One score over the sites that have it; `std` is the population's (METHODS §7).

    `worst` is the smallest value, or the largest of a score that is better lower.
    """

    mean: float
    std: float
    worst: float
    sites: int


def lower_is_better(name: str) -> bool:
    """Of errors and losses; of all other scores, more is better."""
    return name.rpartition(".")[2] in ("ece", "loss")


def spread(values: list[float], lower_is_better: bool = False) -> Spread:
    """Mean, population standard deviation and worst of at least one value; no finite value overflows on the way."""
    mean = math.fsum(value / len(values) for value in values)
    std = math.hypot(*(value - mean for value in values)) / math.sqrt(len(values))
    return Spread(mean, std, (max if lower_is_better else min)(values), len(values))


def spreads(by_site: Mapping[SiteId, Mapping[str, float]]) -> dict[str, Spread]:
    """Each score over the sites that report it."""
    names = sorted({name for scores in by_site.values() for name in scores})
    values = {name: [scores[name] for scores in by_site.values() if name in scores] for name in names}
    return {name: spread(some, lower_is_better(name)) for name, some in values.items()}
