"""A comparison: a row a recipe, mean and standard deviation over seeds, and differences to one of the recipes.

Differences are paired by seed: a seed deals the data and draws the model alike for all recipes. The interval is
Student's t of the differences. With few seeds a bootstrap of percentiles is far too narrow: three values have ten
different resamples. An interval by inverting an exact test has no 95 % below six seeds. Student's t takes the
differences as normal. The test does not. Under the hypothesis that a recipe is as good as the reference, every
difference has either sign with equal chance. p is the share of all 2^n signs whose mean is as far from 0. Its smallest
value with n seeds is 2 / 2^n, whatever the differences.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from protofed.common.config.recipe import Recipe
from protofed.common.protocol.scores import LOSS, deviation, spread
from protofed.deploy.experiments.experiment import Result
from protofed.deploy.experiments.summary import Summary, TableColumn, Target, named, summarise, to_reach, usual
from protofed.deploy.experiments.tuning import TunedRecipe
from protofed.server.rounds.scores.model_warnings import (
    ModelWarning,
    RoundScores,
    RunHistory,
    TrainedRound,
    model_warnings,
)

CONFIDENCE, LEVEL = 0.95, 0.05
MAX_EXACT = 16  # seeds; of more, so many signs are drawn as these have
TIE = 2.0**-30  # of the largest difference: the unit of means; shares of images are no odd halves of a power of two
_SEED = 0  # of those that are drawn


@dataclass(frozen=True)
class PairedDifference:
    """A recipe's score less the reference's, over the seeds that both have.

    Attributes:
        mean: of the differences.
        low, high: the 95 % interval; None: of one seed there is none.
        p: two-sided, of the sign-flip test; None: likewise.
        corrected: p after Holm's correction over the rows of a column.
    """

    seeds: tuple[int, ...]
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    corrected: float | None = None

    @property
    def significant(self) -> bool:
        """Whether the corrected p is at most 5 %."""
        return self.corrected is not None and self.corrected <= LEVEL


def smallest_p(seeds: int) -> float:
    """The smallest two-sided p that the signs of so many differences can have."""
    return 2.0 ** (1 - min(seeds, MAX_EXACT))


def seeds_needed(rows: int) -> int:
    """The fewest seeds with which a difference may be significant at 5 %, corrected over so many rows."""
    return next(n for n in range(1, MAX_EXACT + 1) if rows * smallest_p(n) <= LEVEL or n == MAX_EXACT)


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> PairedDifference | None:
    """By seed, a recipe's scores less the reference's; None: no seed has both."""
    seeds = tuple(sorted(values.keys() & reference.keys()))
    if not seeds:
        return None
    differences = np.array([values[seed] - reference[seed] for seed in seeds])  # [seeds]
    pair = PairedDifference(seeds, spread(differences.tolist()).mean)
    if len(seeds) == 1:
        return pair
    low, high = _interval(differences)
    return replace(pair, low=low, high=high, p=_sign_flip_p(differences))


def corrected(differences: Mapping[str, PairedDifference]) -> dict[str, PairedDifference]:
    """The rows of a column with Holm's correction: the k-th smallest p of m times m - k + 1; p never falls."""
    ranked = sorted((name for name, of in differences.items() if of.p is not None), key=lambda n: _p(differences[n]))
    result, least = dict(differences), 0.0
    for rank, name in enumerate(ranked):
        least = max(least, min(1.0, (len(ranked) - rank) * _p(differences[name])))
        result[name] = replace(differences[name], corrected=least)
    return result


def _p(of: PairedDifference) -> float:
    return 1.0 if of.p is None else of.p


def _interval(differences: NDArray[np.float64]) -> tuple[float, float]:
    count = len(differences)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * float(differences.std(ddof=1)) / math.sqrt(count)
    mean = float(differences.mean())
    return mean - half, mean + half


def _sign_flip_p(differences: NDArray[np.float64]) -> float:
    """Over all 2^n signs; of more than 2^16, over as many that are drawn.

    Means are rounded to whole units of `TIE`. Otherwise chance would decide whether a mean that differs in the last
    bits counts as farther from 0. SciPy tolerates a difference in the last bits of a mean, which may be near 0, and not
    in those of the differences.
    """
    if not differences.any():
        return 1.0
    step = float(np.abs(differences).max()) * TIE
    test = stats.permutation_test(
        (differences,),
        lambda sample, axis: np.rint(sample.mean(axis) / step),
        permutation_type="samples",
        vectorized=True,
        n_resamples=2**MAX_EXACT,
        batch=1024,
        rng=np.random.default_rng(_SEED),
    )
    return float(test.pvalue)


def can_show(seeds: Collection[int], rows: int) -> str:
    """What so many seeds can show at all, in a sentence.

    Args:
        seeds: the different numbers of seeds of the rows that are tested.
        rows: tested ones of a column.
    """
    n = max(seeds)
    least = smallest_p(n)
    needed = seeds_needed(rows)
    of = f"With {'at most ' if len(set(seeds)) > 1 else ''}{n} seeds no p is below {least:.3g} (2 / 2^{n})"
    if rows > 1:
        of += f", {min(1.0, rows * least):.3g} after Holm's correction over {rows} rows"
    if rows * least > LEVEL:
        return f"{of}: no difference can be significant at 5 %, however large. That takes {needed} seeds or more."
    return f"{of}."


@dataclass(frozen=True)
class OverSeeds:
    """Mean and sample standard deviation (n - 1): seeds are drawn, unlike the sites of a run, which are all there are.

    Of a single seed there is no deviation.
    """

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: list[float]) -> OverSeeds:
        """Of at least one value."""
        mean, n = spread(values).mean, len(values)
        return cls(mean, deviation(values, mean) * math.sqrt(n / (n - 1)) if n > 1 else None)


@dataclass(frozen=True)
class ComparisonRow:
    """One recipe.

    Attributes:
        seeds: all that it was to be run with.
        values: by column and seed, in fractions; seeds without result or score are left out.
    """

    label: str
    seeds: Sequence[int]
    values: Mapping[str, Mapping[int, float]]
    finished: Sequence[int]

    def over_seeds(self, column: str) -> OverSeeds | None:
        """Mean and standard deviation over the seeds that have the number."""
        values = list(self.values[column].values())
        return OverSeeds.of(values) if values else None


@dataclass(frozen=True)
class CompareOptions:
    """How results are compared, as users ask for it.

    Attributes:
        metrics: names of the only columns; none: the usual ones that the results have.
        against: the recipe that the others are compared with; None: the first.
        target: a score that is to be reached; None: none.
        shortened: rounds to which recipes were cut.
        tuned: the search before; none: there was none.
        other_code: by recipe, seeds of results that other code than the installed one has computed.
    """

    metrics: Sequence[str] = ()
    against: str | None = None
    target: Target | None = None
    shortened: int | None = None
    tuned: Sequence[TunedRecipe] = ()
    other_code: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Recipes side by side.

    Attributes:
        results: by recipe, in the order of the rows.
        against: the recipe that the others are compared with; empty: no recipe has a result.
        differences: by column and recipe, of the other recipes that have a seed in common with it.
    """

    columns: Sequence[TableColumn]
    rows: Sequence[ComparisonRow]
    results: Mapping[str, Sequence[Result]]
    options: CompareOptions
    against: str
    differences: Mapping[str, Mapping[str, PairedDifference]]

    @classmethod
    def of(cls, jobs: Sequence[tuple[Recipe, Result | None]], options: CompareOptions | None = None) -> Comparison:
        """The comparison of the jobs, finished or not.

        Raises:
            ConfigError: no result has a metric that was asked for.
        """
        settings = options or CompareOptions()
        seeds, results = dict[str, list[int]](), dict[str, list[Result]]()
        for recipe, result in jobs:
            seeds.setdefault(recipe.name, []).append(recipe.seed)
            results.setdefault(recipe.name, []).extend([result] if result else [])
        runs = {
            name: {result.recipe.seed: summarise(result) for result in of_recipe} for name, of_recipe in results.items()
        }
        all_runs = [run for by_seed in runs.values() for run in by_seed.values()]
        columns = _columns(all_runs, settings)
        rows = [
            ComparisonRow(
                name,
                seeds[name],
                {column.header: _values(column, by_seed) for column in columns},
                finished=list(by_seed),
            )
            for name, by_seed in runs.items()
        ]
        against = settings.against or next(iter(seeds), "")
        differences = {column.header: _differences(column.header, rows, against) for column in columns}
        return cls(columns, rows, results, settings, against, differences)

    @property
    def tested(self) -> list[TableColumn]:
        """The columns whose differences are shown first; of two with the same values the first."""
        columns: dict[tuple[object, ...], TableColumn] = {}
        for column in self.columns:
            if column.tested and self.differences[column.header]:
                values = tuple(tuple(row.values[column.header].items()) for row in self.rows)
                columns.setdefault(values, column)
        return list(columns.values())

    @property
    def warnings(self) -> list[tuple[str, int, ModelWarning]]:
        """What speaks against the models, each with its recipe and seed."""
        runs = [(label, result) for label, results in self.results.items() for result in results]
        return [(label, result.recipe.seed, warning) for label, result in runs for warning in warnings_about(result)]


def _columns(runs: Sequence[Summary], options: CompareOptions) -> list[TableColumn]:
    """The columns that were asked for, or else the usual ones; none without runs."""
    if not runs:
        return usual(runs)
    columns = [named(metric, runs) for metric in options.metrics] if options.metrics else usual(runs)
    return [*columns, *(to_reach(options.target) if options.target else ())]


def _values(column: TableColumn, by_seed: Mapping[int, Summary]) -> dict[int, float]:
    read = {seed: column.read(run) for seed, run in by_seed.items()}
    return {seed: value for seed, value in read.items() if value is not None}


def _differences(column: str, rows: Sequence[ComparisonRow], against: str) -> dict[str, PairedDifference]:
    reference = next((row.values[column] for row in rows if row.label == against), {})
    pairs = {row.label: paired(row.values[column], reference) for row in rows if row.label != against}
    return corrected({label: pair for label, pair in pairs.items() if pair is not None})


def warnings_about(result: Result) -> list[ModelWarning]:
    """What speaks against the models of a run that has ended, from its scores and losses: a result has no update."""
    recipe, numbers = result.recipe, sorted({*result.scores, *result.sums})
    by_round = [(number, result.scores.get(number, {})) for number in numbers]
    losses = {number: [one[LOSS] for one in sites.values() if LOSS in one] for number, sites in by_round}
    return model_warnings(
        RunHistory(
            recipe.classes,
            recipe.rounds,
            ended=True,
            global_model=False,  # its states are not in a result
            class_names=recipe.class_names,
            scored=[RoundScores(number, sites, result.sums.get(number, {})) for number, sites in by_round],
            trained=[TrainedRound(number, None, losses=values) for number, values in losses.items()],
        )
    )
