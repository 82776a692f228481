"""A run's scores over rounds and sites, as the papers report them (METHODS §3.5, §7)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean
from typing import TypeAlias

import numpy as np

from protofed.common.errors import ConfigError, DataError
from protofed.common.payload import SiteId
from protofed.common.protocol.scores import Spread, lower_is_better, spreads
from protofed.deploy.experiments.experiment import Result


@dataclass(frozen=True)
class Cost:
    """Of all rounds up to one.

    Attributes:
        bytes: of updates, and of the models that sites were asked to train, all sites together; None: not known.
        epochs: passes of a site over its own training examples, of a round's sites in the mean; None: not known.
            Whatever a method trains is counted: heads, second models, fine-tuning.
    """

    bytes: int | None
    epochs: float | None

    @property
    def megabytes(self) -> float | None:
        """Of 10^6 bytes."""
        return None if self.bytes is None else self.bytes / 1e6


@dataclass(frozen=True)
class Target:
    """A score that is to be reached, `global.accuracy=0.8`."""

    score: str
    value: float

    @classmethod
    def read(cls, text: str) -> Target:
        """As the command line has it.

        Raises:
            ConfigError: it is no score and number.
        """
        score, _, value = text.partition("=")
        if not re.fullmatch(r"\d*\.?\d+", value):
            raise ConfigError(f"--reach {text}: expected a score and a value, such as global.accuracy=0.8")
        return cls(score, float(value))

    def reached(self, means: Mapping[int, float]) -> int | None:
        """The first round whose mean is as good; None: none is."""
        lower = lower_is_better(self.score)
        good = (n for n in sorted(means) if (means[n] <= self.value if lower else means[n] >= self.value))
        return next(good, None)

    @property
    def shown(self) -> str:
        """The value, shares in percent."""
        return f"{self.value:g}" if self.score.endswith("loss") else f"{100 * self.value:g} %"


def costs(result: Result) -> dict[int, Cost]:
    """The cost of a run up to each of its rounds; empty: it was not recorded."""
    numbers = sorted(result.trained)
    held = result.train_examples
    by_round = (
        fmean(examples / held[site] for site, examples in result.trained[number].items() if held.get(site))
        for number in numbers
    )
    epochs = dict(zip(numbers, accumulate(by_round), strict=True))
    moved = accumulate(of.up + of.down for _, of in sorted(result.traffic.items()))
    totals = dict(zip(sorted(result.traffic), moved, strict=True))
    return {number: Cost(totals.get(number), epochs.get(number)) for number in sorted({*epochs, *totals})}


SiteScores: TypeAlias = Mapping[SiteId, Mapping[str, float]]
Scores: TypeAlias = Mapping[int, SiteScores]  # by scored round, as `Ledger.scores`
Sums: TypeAlias = Mapping[int, Mapping[str, Spread]]  # likewise, as `Ledger.score_sums`

OWN_LOCAL, SHARED_LOCAL = "personal.local.accuracy", "global.local.accuracy"


@dataclass(frozen=True)
class Summary:
    """What a report says of one run; of its last scored round where no other is named. A round of 0: never scored.

    Attributes:
        sites: by score, over all sites that have it.
        active: the same over the sites of that round's cohort only (FedNH's code).
        worst_class: by prefix (`global`, `personal.local`, ...), the smallest recall of a class in the mean over sites.
        recent: by score, the mean over the last 10 rounds that have it of the mean over sites (FedPRP).
        local: by round, accuracy of the sites' own models on their own test sets, pooled: sum_k n_k acc_k / sum_k n_k
            (cwFedAVG); empty where sizes of test sets are not known.
        shared_local: likewise of the global model.
        means: by round and score, the mean over sites.
        costs: by round, of all rounds up to it; empty: they were not recorded.
        held_out: by score, over the sites that took no part, after a round of their own; empty: there are none.
    """

    round: int
    sites: Mapping[str, Spread]
    active: Mapping[str, Spread]
    worst_class: Mapping[str, float]
    recent: Mapping[str, float]
    local: Mapping[int, float]
    shared_local: Mapping[int, float]
    means: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    costs: Mapping[int, Cost] = field(default_factory=dict)
    held_out: Mapping[str, Spread] = field(default_factory=dict)


def summary(
    scores: Scores,
    cohorts: Mapping[int, Collection[SiteId]],
    tested: Mapping[SiteId, int],
    sums: Sums | None = None,
    costs: Mapping[int, Cost] | None = None,
    held_out: SiteScores | None = None,
) -> Summary:
    """Everything that reports say of a finished run.

    Args:
        scores: by round, site and name.
        cohorts: by scored round, the sites whose updates it aggregated.
        sums: what secure sums say of the sites' own scores.
        costs: by round, as of `Summary`.
        held_out: by site and name, of the sites that took no part.
        tested: n_k, examples in each site's own test set; empty where they are not known.

    Raises:
        DataError: a site has a score on its own test set, but not its size while others have theirs.
    """
    by_round = over_sites(scores, sums or {})
    last = max(by_round, default=0)
    by_site, sites = scores.get(last, {}), by_round.get(last, {})
    return Summary(
        round=last,
        sites=sites,
        active=spreads(active(by_site, cohorts.get(last, ()))),
        worst_class=worst_classes(sites),
        recent=recent(by_round),
        local=local_accuracies(scores, tested, OWN_LOCAL) if tested else {},
        shared_local=local_accuracies(scores, tested, SHARED_LOCAL) if tested else {},
        means={number: {name: spread.mean for name, spread in of.items()} for number, of in by_round.items()},
        costs=costs or {},
        held_out=spreads(held_out or {}),
    )


def active(by_site: SiteScores, cohort: Collection[SiteId]) -> SiteScores:
    """The scores of the cohort's sites only."""
    return {site: scores for site, scores in by_site.items() if site in cohort}


def local_accuracies(scores: Scores, tested: Mapping[SiteId, int], name: str) -> dict[int, float]:
    """By round in order, over the sites that have the score; rounds in which none has it are left out.

    Raises:
        DataError: a site has the score, but no size of at least one example in `tested`.
    """
    found = dict[int, float]()
    for number in sorted(scores):
        values = {site: own[name] for site, own in scores[number].items() if name in own}
        if unsized := sorted(site for site in values if tested.get(site, 0) < 1):
            raise DataError(
                f"site '{unsized[0]}' has a {name} but no size of its test set; "
                "expected the number of its test examples, or none for any site"
            )
        if values:
            found[number] = float(np.average(list(values.values()), weights=[tested[site] for site in values]))
    return found


def over_sites(scores: Scores, sums: Sums) -> dict[int, dict[str, Spread]]:
    """Each score over the sites that have it, by round."""
    return {number: spreads(scores.get(number, {}), sums.get(number, {})) for number in sorted({*scores, *sums})}


def recent(by_round: Mapping[int, Mapping[str, Spread]], rounds: int = 10) -> dict[str, float]:
    """By score, the mean over the last `rounds` rounds that have it of the mean over sites."""
    means: dict[str, list[float]] = {}
    for number in sorted(by_round):
        for name, value in by_round[number].items():
            means.setdefault(name, []).append(value.mean)
    return {name: float(np.mean(values[-rounds:])) for name, values in means.items()}


def worst_classes(sites: Mapping[str, Spread]) -> dict[str, float]:
    """By the prefix of `<prefix>.recall.<c>`, the smallest mean recall of a class."""
    recalls: dict[str, list[float]] = {}
    for name, value in sites.items():
        prefix, of, _ = name.rpartition(".recall.")
        if of:
            recalls.setdefault(prefix, []).append(value.mean)
    return {prefix: min(of) for prefix, of in recalls.items()}
