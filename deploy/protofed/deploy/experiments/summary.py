"""A run's scores as the papers report them (METHODS §3.5, §7), and the columns that a comparison has of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import attrgetter
from statistics import fmean
from typing import TypeAlias

import numpy as np

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, DataError, unknown
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import score_family
from protofed.common.protocol.scores import (
    LOSS,
    OWN_METRIC,
    Spread,
    is_share,
    lower_is_better,
    spreads,
)
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
        return f"{100 * self.value:g} %" if is_share(self.score) else f"{self.value:g}"


def costs(result: Result) -> dict[int, Cost]:
    """The cost of a run up to each of its rounds; empty: it was not recorded."""
    numbers = sorted(result.trained)
    sizes = result.train_examples
    by_round = (
        fmean(examples / sizes[site] for site, examples in result.trained[number].items() if sizes.get(site))
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
    means: Mapping[int, Mapping[str, float]]
    costs: Mapping[int, Cost]
    held_out: Mapping[str, Spread]


def summarise(result: Result) -> Summary:
    """Everything that reports say of a finished run.

    Raises:
        DataError: a site has a score on its own test set, but not its size while others have theirs.
    """
    scores, tested = result.scores, result.local_test_examples
    by_round = over_sites(scores, result.sums)
    last = max(by_round, default=0)
    by_site, sites = scores.get(last, {}), by_round.get(last, {})
    return Summary(
        round=last,
        sites=sites,
        active=spreads(active(by_site, result.cohorts.get(last, ()))),
        worst_class=worst_classes(sites),
        recent=recent(by_round),
        local=local_accuracies(scores, tested, OWN_LOCAL) if tested else {},
        shared_local=local_accuracies(scores, tested, SHARED_LOCAL) if tested else {},
        means={number: {name: spread.mean for name, spread in of.items()} for number, of in by_round.items()},
        costs=costs(result),
        held_out=spreads(result.held_out),
    )


def active(by_site: SiteScores, cohort: Collection[SiteId]) -> SiteScores:
    """The scores of the cohort's sites only."""
    return {site: scores for site, scores in by_site.items() if site in cohort}


def local_accuracies(scores: Scores, tested: Mapping[SiteId, int], name: str) -> dict[int, float]:
    """By round in order, over the sites that have the score; rounds in which none has it are left out.

    Raises:
        DataError: a site has the score, but no size of at least one example in `tested`.
    """
    accuracies = dict[int, float]()
    for number in sorted(scores):
        values = {site: own[name] for site, own in scores[number].items() if name in own}
        if unsized := sorted(site for site in values if tested.get(site, 0) < 1):
            raise DataError(
                f"site '{unsized[0]}' has a {name} but no size of its test set; "
                "expected the number of its test examples, or none for any site"
            )
        if values:
            accuracies[number] = float(np.average(list(values.values()), weights=[tested[site] for site in values]))
    return accuracies


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


@dataclass(frozen=True)
class TableColumn:
    """One number of a run; `read` answers None where the run has no such scores.

    Attributes:
        meaning: for the table's caption.
        percent: whether people are shown it times 100.
        digits: behind the point, as people are shown it.
        cost: it says what a run costs, not how good it is.
        lower_is_better: of a score.
        tested: whether differences to a reference are shown where no column is asked for.
    """

    header: str
    meaning: str
    read: Callable[[Summary], float | None]
    percent: bool = True
    digits: int = 1
    cost: bool = False
    lower_is_better: bool = False
    tested: bool = False


def usual(runs: Sequence[Summary]) -> list[TableColumn]:
    """Those of the usual columns that any of the runs has; of runs without classes, all scores but those by finding."""
    present = [column for column in USUAL if any(column.read(run) is not None for run in runs)]
    names = sorted({name for run in runs for name in run.sites if score_family(name) == name and name != LOSS})
    if not names or any(name.rpartition(".")[2] == "accuracy" for name in names):
        return present
    return [*(named(name, runs) for name in names if not OWN_METRIC.fullmatch(name)), *present]


def to_reach(target: Target) -> list[TableColumn]:
    """What it takes until a score is reached: rounds, bytes and local epochs; None for a run that never reaches it."""
    when = f"the first scored round whose {target.score}, mean over sites, is {target.shown} or better"
    cost = partial(TableColumn, percent=False, cost=True, lower_is_better=True)
    return [
        cost(
            f"rounds to {target.shown}", f"{when} (–: never, or not scored)", partial(_reached, target, None), digits=0
        ),
        cost(f"MB to {target.shown}", "megabytes up to it", partial(_reached, target, MEGABYTES)),
        cost(f"epochs to {target.shown}", "local epochs up to it", partial(_reached, target, EPOCHS)),
    ]


def named(metric: str, runs: Sequence[Summary]) -> TableColumn:
    """A column by the name of a score, as `personal.pm_v`, or with one of TAKES, as `personal.pm_v:worst`.

    Raises:
        ConfigError: no run has such a score, or there is no such take.
    """
    name, take = _parted(metric)
    scores = {score for run in runs for score in run.sites}
    if name not in scores:
        raise unknown("metric", name, scores)
    lower = lower_is_better(name) or take == "std"
    return TableColumn(
        metric,
        TAKES[take].meaning if metric == name else f"{name}, {TAKES[take].meaning}",
        _take(take, name),
        percent=is_share(name),
        digits=1 if is_share(name) else 4,
        lower_is_better=lower,
        tested=True,
    )


def check_metric(metric: str, recipes: Sequence[Recipe]) -> None:
    """Refuse, before any job runs, the name of a column that no run of the recipes can have.

    Raises:
        ConfigError: no run has such a score, there is no such take, or no recipe has the sites that it is taken over.
    """
    name, take = _parted(metric)
    if take == HELD_OUT and not any(recipe.data is not None and recipe.data.held_out_sites for recipe in recipes):
        raise ConfigError(
            f"no recipe has sites for '{metric}'; expected data.held_out_sites of 1 or more in one of them"
        )
    possible = [recipe.score_names() for recipe in recipes]
    own = name == LOSS or OWN_METRIC.fullmatch(name)  # those of a plug-in's method are known when it has run
    if not own and all(scores.family(name) is None for scores in possible):
        raise unknown("metric", name, {LOSS}.union(*(scores.families for scores in possible)))


def _parted(metric: str) -> tuple[str, str]:
    """A score, and the number that is taken from it."""
    name, _, take = metric.partition(":")
    if (take or "mean") not in TAKES:
        raise unknown("ending of a metric", take, TAKES)
    return name, take or "mean"


@dataclass(frozen=True)
class Take:
    """What is taken of a score, as the ending of a metric names it."""

    meaning: str
    read: Callable[[Summary, str], float | None]


MEGABYTES, EPOCHS = attrgetter("megabytes"), attrgetter("epochs")  # of a `Cost`
HELD_OUT = "held-out"
TAKES = {
    "mean": Take("mean over sites", lambda run, name: _mean(run.sites, name)),
    "std": Take(
        "population standard deviation over sites", lambda run, name: run.sites[name].std if name in run.sites else None
    ),
    "worst": Take("of the worst site", lambda run, name: run.sites[name].worst if name in run.sites else None),
    "active": Take("mean over the last cohort", lambda run, name: _mean(run.active, name)),
    "recent": Take("mean over the last 10 scored rounds and over sites", lambda run, name: run.recent.get(name)),
    HELD_OUT: Take(
        "mean over the sites that took no part, after one round of their own from the last model",
        lambda run, name: _mean(run.held_out, name),
    ),
}


def _mean(spreads: Mapping[str, Spread], name: str) -> float | None:
    return spreads[name].mean if name in spreads else None


def _take(take: str, name: str) -> Callable[[Summary], float | None]:
    return lambda run: TAKES[take].read(run, name)


def _last(local: Mapping[int, float]) -> float | None:
    return local[max(local)] if local else None


def _best(local: Mapping[int, float]) -> float | None:
    """Over rounds: cwFedAVG's best-mean accuracy."""
    return max(local.values(), default=None)


def _total(read: Callable[[Cost], float | None], run: Summary) -> float | None:
    return read(run.costs[max(run.costs)]) if run.costs else None


def _reached(target: Target, read: Callable[[Cost], float | None] | None, run: Summary) -> float | None:
    means = {number: of[target.score] for number, of in run.means.items() if target.score in of}
    if (number := target.reached(means)) is None:
        return None
    return number if read is None else read(run.costs[number]) if number in run.costs else None


_score = partial(TableColumn, tested=True)
_cost = partial(TableColumn, percent=False, cost=True, lower_is_better=True)
USUAL = (
    _score("GM", "the global model's accuracy on the test set", _take("mean", "global.accuracy")),
    _score("balanced", "the global model's balanced accuracy", _take("mean", "global.balanced_accuracy")),
    TableColumn(
        "worst class", "the global model's smallest recall of a class", lambda run: run.worst_class.get("global")
    ),
    TableColumn("many", "the global model on the most frequent classes", _take("mean", "global.many")),
    TableColumn("medium", "on those between", _take("mean", "global.medium")),
    TableColumn("few", "on the rarest ones", _take("mean", "global.few")),
    TableColumn("groups", "mean of these three", _take("mean", "global.groups")),
    _score("PM(V)", "sites' own models on the classes that they have", _take("mean", "personal.pm_v")),
    TableColumn("worst site", "smallest PM(V)", _take("worst", "personal.pm_v")),
    TableColumn("PM(L)", "the same, weighted by the site's class frequencies", _take("mean", "personal.pm_l")),
    TableColumn(
        "fairness",
        "population standard deviation of PM(L) over sites",
        _take("std", "personal.pm_l"),
        lower_is_better=True,
    ),
    TableColumn("own balanced", "sites' own models on all classes", _take("mean", "personal.balanced_accuracy")),
    TableColumn(
        "own worst class", "their smallest mean recall of a class", lambda run: run.worst_class.get("personal")
    ),
    _score("GM local", "the global model on the sites' local tests, pooled", lambda run: _last(run.shared_local)),
    TableColumn(
        "GM best", "the same in its best round: too high, as every maximum", lambda run: _best(run.shared_local)
    ),
    TableColumn("GM worst site", "the same at the worst site", _take("worst", "global.local.accuracy")),
    _score("local", "sites' own models on their local tests, pooled", lambda run: _last(run.local)),
    TableColumn("local best", "the same in its best round: too high, as every maximum", lambda run: _best(run.local)),
    TableColumn(
        "local worst", "the worst site's own model on its local test", _take("worst", "personal.local.accuracy")
    ),
    TableColumn(
        "local worst class", "smallest mean recall of a class there", lambda run: run.worst_class.get("personal.local")
    ),
    _score(
        "held-out PM(V)",
        "own models of sites that took no part, after one round from the last model, on the classes that they have",
        _take(HELD_OUT, "personal.pm_v"),
    ),
    _score("held-out local", "the same on their local tests, mean over them", _take(HELD_OUT, OWN_LOCAL)),
    _cost(
        "MB",
        "10^6 bytes of updates and of the models that sites trained, over all sites and rounds",
        partial(_total, MEGABYTES),
    ),
    _cost(
        "epochs",
        "local epochs that were trained, over all rounds: passes of a round's sites over their own training images",
        partial(_total, EPOCHS),
    ),
)
