"""The closed list of numbers that sites may report: their names, who reports them, and the range of each.

A run's task says which scores there are (`common.config.tasks`). Sites name their scores by this list, and policies
choose from it. The server refuses whatever is not in it. A name that nobody computes, or a value that no model can
have, must reach no table, report or alert.

`Spread` is a score over sites: mean, standard deviation and worst.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any, Literal

from protofed.common.errors import nearest, short
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import QUALIFIED, Role, Scores, score_family

BINS = 15  # of the calibration error and the reliability diagram, as in Guo et al., ICML 2017
# By the prefix of a score, the role that takes it. The scores of the global model on the shared test set are the
# federation's headline: evaluators take them, and nobody else.
TESTS = {
    "global": Role.EVALUATOR,
    "personal": Role.TRAINER,
    "global.local": Role.TRAINER,
    "personal.local": Role.TRAINER,
}
MAJORITY = "global.majority"  # accuracy of always saying the test set's most common class: no model's own
RELIABILITY = tuple(f"reliability.{name}" for name in ("accuracy", "confidence", "share"))
_RELIABILITY = tuple(f"global.{name}" for name in RELIABILITY)
ROUNDING = 1e-6  # of a score, as a share of its range: sums in float32 may exceed it by so much
# The first of these that a run has judges its rounds, if its recipe names none. Balanced accuracy first: where classes
# are skewed, the largest accuracy may be that of a model that knows the common class alone. Then those of other tasks.
JUDGED_BY = (
    "global.balanced_accuracy",
    "global.accuracy",
    "personal.local.accuracy",
    "personal.pm_v",
    "personal.balanced_accuracy",
    "personal.accuracy",
    "global.local.accuracy",
    *(
        f"{test}.{score}"
        for score in ("auroc", "mae")
        for test in ("global", "personal.local", "personal", "global.local")
    ),
)
_LOWER = frozenset({"ece", "loss", "brier", "mae"})  # scores of which lower values are better
_SHARES = frozenset(  # that people read in percent
    {"accuracy", "balanced_accuracy", "recall", "many", "medium", "few", "groups", "pm_v", "pm_l", "majority", "share"}
    | {"confidence", "auroc", "average_precision", "sensitivity", "ece"}
    | {"class_auroc", "class_average_precision", "class_sensitivity"}
)
_UNRANKED = frozenset({"majority", "ece", "bias", "agreement_low", "agreement_high"})  # that judge no model alone
LOSS = "loss"
MAX_LOSS = 1e9  # a loss of training; a model that gives more has diverged
OWN_METRIC = re.compile(r"train\.[a-z][a-z0-9_]{0,31}")  # a number that a plug-in's method reports of its training
MAX_OWN_METRICS, MAX_OWN_METRIC = 16, 1e9  # of one update, and the largest absolute value of one
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")  # one spelling for each number, ASCII digits only

Indexed = Literal["none", "class", "bin"]
Needs = Literal["", "frequency_groups", "probabilities", "clinical"]


@dataclass(frozen=True)
class TaskScore:
    """A score that a task takes of each model, on each test set.

    Attributes:
        name: without the test set, as `recall`.
        indexed: `class`: one for each output of the model, as `recall.3`; `bin`: one for each bin of the confidence.
        needs: the key of `[evaluation]` without which nobody has it; empty: every run of the task has it.
        low, high: the least and the largest value.
        tests: where it is taken, of `TESTS`.
    """

    name: str
    indexed: Indexed = "none"
    needs: Needs = ""
    low: float = 0.0
    high: float = 1.0
    tests: tuple[str, ...] = tuple(TESTS)


@dataclass(frozen=True)
class ScoreFamily:
    """Scores of one name but for the number at its end, on one test set."""

    role: Role
    indexed: Indexed
    needs: Needs
    low: float
    high: float


def list_families(scores: Iterable[TaskScore]) -> dict[str, ScoreFamily]:
    """A task's scores by their names with the test set, as `global.recall`."""
    return {
        f"{test}.{score.name}": ScoreFamily(TESTS[test], score.indexed, score.needs, score.low, score.high)
        for score in scores
        for test in score.tests
    }


@dataclass(frozen=True)
class ScoreNames:
    """The scores that one run can have.

    Attributes:
        classes: of the run, C.
        families: of its task, by name.
        evaluation: keys of `[evaluation]` that the recipe switches on.
        qualifiers: what an evaluator may report of each score besides, as `global.auroc@low`.
    """

    classes: int
    families: Mapping[str, ScoreFamily]
    evaluation: Collection[str] = ()
    qualifiers: Collection[str] = ()

    def problem(self, scores: Scores, roles: Collection[Role]) -> str | None:
        """Why a site of these roles cannot report these scores, by the first one's name; None: it can.

        There can be no more scores than names, so their number needs no bound of its own.
        """
        for name, value in sorted(scores.items()):
            if (family := self.family(name)) is None:
                return f"'{short(name)}' is no score of this run"
            if family.role not in roles:
                return f"'{name}' is a score that only a site enrolled as {family.role} reports"
            slack = ROUNDING * (family.high - family.low)
            if not family.low - slack * (family.low < 0) <= value <= family.high + slack:  # a share is not below 0
                return f"{name} = {value:g}: expected {family.low:g} to {family.high:g}"
        return None

    def judges(self, name: str) -> ScoreFamily:
        """The family of a score that can judge the run's rounds: the rounds can have it, and it says which is better.

        Raises:
            ValueError: there is no such score, or this run's rounds never have it, with what to do.
        """
        stem = name.rpartition(".")[0]
        family = self.families.get(name) or self.families.get(stem)
        if family is None or not _ranks(stem if name not in self.families else name, family):
            judging = [known for known, of_name in self.families.items() if _ranks(known, of_name)]
            near = nearest(name, judging) if family is None else ""
            usual = next((known for known in JUDGED_BY if known in self.families), "")
            meant = f"did you mean '{near}'?" if near else f"such as '{usual}'"
            raise ValueError(f"'{short(name)}': expected a score that can judge a round; {meant}")
        if not self._is_on(family):
            raise ValueError(f"'{name}' is taken only with evaluation.{family.needs} = true; set it, or take another")
        if self.family(name) is None:
            one = f"'{name if name in self.families else stem}.0' to '.{self.classes - 1}', one class's"
            expected = one if family.indexed == "class" else f"'{stem}'"
            raise ValueError(f"'{short(name)}': expected {expected}")
        return family

    def spelled(self, family: str) -> list[str]:
        """The names of a family's scores in this run, one for each number at its end; none: it is not taken."""
        known = self.families[family]
        if not self._is_on(known):
            return []
        count = {"none": 0, "bin": BINS, "class": self.classes}[known.indexed]
        return [f"{family}.{number}" for number in range(count)] or [family]

    def family(self, name: str) -> ScoreFamily | None:
        """What is known of a score by its name; None: this run has no such score."""
        score, qualified, qualifier = name.partition(QUALIFIED)
        if qualified:
            return (
                self.family(score) if qualifier in self.qualifiers and may_be_qualified(score_family(score)) else None
            )
        if (family := self.families.get(name)) is not None and family.indexed == "none":
            return family if self._is_on(family) else None
        stem, _, index = name.rpartition(".")
        family = self.families.get(stem)
        if family is None or family.indexed == "none" or not self._is_on(family) or not _INDEX.fullmatch(index):
            return None
        return family if int(index) < (BINS if family.indexed == "bin" else self.classes) else None

    def _is_on(self, family: ScoreFamily) -> bool:
        return not family.needs or family.needs in self.evaluation


def may_be_qualified(family: str) -> bool:
    """Whether a score has intervals and subgroups: an evaluator's, other than what describes its whole test set."""
    return family.startswith("global.") and ".local." not in family and family not in (MAJORITY, *_RELIABILITY)


def name_ends(subgroup: str = "") -> tuple[str, str]:
    """The qualifiers of the lower and the upper end of an interval, of the whole test set or of a subgroup."""
    before = f"{subgroup}{QUALIFIED}" if subgroup else ""
    return f"{before}low", f"{before}high"


def _ranks(family: str, of_name: ScoreFamily) -> bool:
    return of_name.indexed != "bin" and family.rpartition(".")[2] not in _UNRANKED


def metrics_problem(metrics: Scores) -> str | None:
    """Why an update cannot have these numbers beside it; None: it can.

    They are the training's `loss`, and `train.<name>` of a plug-in's method.
    """
    for name, value in sorted(metrics.items()):
        if name == LOSS:
            if not 0 <= value <= MAX_LOSS:
                return f"{LOSS} = {value:g}: expected 0 to {MAX_LOSS:g}"
        elif not OWN_METRIC.fullmatch(name):
            return f"'{short(name)}' is no number of a training: expected '{LOSS}' or 'train.<name>'"
        elif not abs(value) <= MAX_OWN_METRIC:  # NaN, too
            return f"{name} = {value:g}: expected at most {MAX_OWN_METRIC:g} in size"
    if len(metrics.keys() - {LOSS}) > MAX_OWN_METRICS:
        return f"{len(metrics)} numbers of a training: expected at most {MAX_OWN_METRICS} beside '{LOSS}'"
    return None


PAIR = 2  # of two values that differ, neither is the odd one out


@dataclass(frozen=True)
class Spread:
    """Mean, population standard deviation (METHODS §7) and worst value of a score over the sites that have it.

    If three evaluators or more report a score of the global model, `mean` is the median. They score the same model on
    the same test set, and no single evaluator must decide the figure. `worst` is the smallest value, or the largest
    where lower is better. `std` and `worst` are None of a secure aggregation, which says the mean alone.
    """

    mean: float
    std: float | None
    worst: float | None
    sites: int


def lower_is_better(name: str) -> bool:
    """Whether lower values of a score are better, as of errors and losses."""
    return score_family(name).rpartition(".")[2] in _LOWER


def is_share(name: str) -> bool:
    """Whether a score is a share, which people read in percent; all others are shown as they are."""
    return score_family(name).rpartition(".")[2] in _SHARES


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
    """Each score over the sites that report it; for aggregated scores, what the aggregates say."""
    names = sorted({name for scores in by_site.values() for name in scores})
    values = {name: [scores[name] for scores in by_site.values() if name in scores] for name in names}
    by_name = {name: spread(scores, lower_is_better(name)) for name, scores in values.items()}
    medians = {name: median_low(scores) for name, scores in values.items() if len(scores) > PAIR and _is_shared(name)}
    by_name |= {name: replace(by_name[name], mean=value) for name, value in medians.items()}
    return dict(sorted((by_name | dict(sums or {})).items()))


def recorded_spreads(entry: Mapping[str, Any]) -> dict[str, Spread]:
    """The scores of a round in a run's record: `sites` has them by site, `sums` what secure aggregation says."""
    aggregated = entry.get("sums", {}).items()
    return spreads(entry["sites"], {name: Spread(of["mean"], None, None, of["sites"]) for name, of in aggregated})


def _is_shared(name: str) -> bool:
    """Whether a score is one of the global model on the test set that all share, an evaluator's."""
    return name.startswith("global.") and not name.startswith("global.local.")
