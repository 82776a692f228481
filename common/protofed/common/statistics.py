"""Scores over sites: mean, standard deviation and worst."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from protofed.common.payload import SiteId


@dataclass(frozen=True)
class Spread:
    """Mean, population standard deviation (METHODS §7) and worst value of a score over the sites that have it.

    `worst` is the smallest value, or the largest where lower is better.
    """

    mean: float
    std: float
    worst: float
    sites: int


def lower_is_better(name: str) -> bool:
    """Whether lower values of a score are better, as of errors and losses."""
    return name.rpartition(".")[2] in ("ece", "loss")


def spread(values: list[float], lower_is_better: bool = False) -> Spread:
    """Mean, population standard deviation and worst of at least one value; no finite values overflow."""
    mean = math.fsum(value / len(values) for value in values)
    std = math.hypot(*(value - mean for value in values)) / math.sqrt(len(values))
    return Spread(mean, std, (max if lower_is_better else min)(values), len(values))


def spreads(by_site: Mapping[SiteId, Mapping[str, float]]) -> dict[str, Spread]:
    """Each score over the sites that report it."""
    names = sorted({name for scores in by_site.values() for name in scores})
    values = {name: [scores[name] for scores in by_site.values() if name in scores] for name in names}
    return {name: spread(scores, lower_is_better(name)) for name, scores in values.items()}
