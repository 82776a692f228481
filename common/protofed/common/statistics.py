"""Scores over sites: mean, standard deviation and worst."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

from protofed.common.payload import SiteId

PAIR = 2  # of two values that differ, neither is the odd one out


@dataclass(frozen=True)
class Spread:
    """Mean, population standard deviation (METHODS §7) and worst value of a score over the sites that have it.

    Of a score of the global model that three evaluators or more report, `mean` is the median: they score the same model
    on the same test set, and no one of them must own the figure. `worst` is the smallest value, or the largest where
    lower is better. `std` and `worst` are None of what comes from a secure sum: it says the mean, and of no site alone.
    """

    mean: float
    std: float | None
    worst: float | None
    sites: int


def lower_is_better(name: str) -> bool:
    """Whether lower values of a score are better, as of errors and losses."""
    return name.rpartition(".")[2] in ("ece", "loss")


def spread(values: list[float], lower_is_better: bool = False) -> Spread:
    """Mean, population standard deviation and worst of at least one value; no finite values overflow."""
    mean = math.fsum(value / len(values) for value in values)
    return Spread(mean, deviation(values, mean), (max if lower_is_better else min)(values), len(values))


def deviation(values: list[float], mean: float) -> float:
    """Population standard deviation of at least one value, whose mean is known."""
    return math.hypot(*(value - mean for value in values)) / math.sqrt(len(values))


def spreads(
    by_site: Mapping[SiteId, Mapping[str, float]], sums: Mapping[str, Spread] | None = None
) -> dict[str, Spread]:
    """Each score over the sites that report it; of those that were summed, what the sums say."""
    names = sorted({name for scores in by_site.values() for name in scores})
    values = {name: [scores[name] for scores in by_site.values() if name in scores] for name in names}
    found = {name: spread(scores, lower_is_better(name)) for name, scores in values.items()}
    medians = {name: median_low(scores) for name, scores in values.items() if len(scores) > PAIR and _is_shared(name)}
    found |= {name: replace(found[name], mean=value) for name, value in medians.items()}
    return dict(sorted((found | dict(sums or {})).items()))


def recorded_spreads(entry: Mapping[str, Any]) -> dict[str, Spread]:
    """The scores of a round in a run's record: `sites` has them by site, `sums` what secure sums say."""
    summed = entry.get("sums", {}).items()
    return spreads(entry["sites"], {name: Spread(of["mean"], None, None, of["sites"]) for name, of in summed})


def _is_shared(name: str) -> bool:
    """Whether a score is one of the global model on the test set that all share, an evaluator's."""
    return name.startswith("global.") and not name.startswith("global.local.")
