"""A search of settings before a comparison: the same values, seeds, rounds and score for every recipe.

Runs of the search score on a validation part of the training images and never see the test set. A recipe's
`data.validation_fraction` says how large this part is, a fifth by default. The runs that are compared then train on all
training images, with the settings whose score is best in the mean over all seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, RunFailedError
from protofed.common.protocol.scores import JUDGED_BY
from protofed.deploy.experiments.experiment import (
    Candidate,
    ExperimentJob,
    Tuning,
    plan_jobs,
    read_values,
    with_settings,
)
from protofed.deploy.experiments.summary import Summary, TableColumn, check_metric, named, summarise

FRACTION = 0.2  # of the training images, where a recipe says none
PREFIX = "tune-"  # of the folders of its jobs


@dataclass(frozen=True)
class Trial:
    """Settings that were tried.

    Attributes:
        scores: by seed, of the runs that have ended.
        failed: seeds of runs that failed, as where training diverges: these settings are not chosen.
        waiting: seeds of runs that have not ended.
    """

    settings: Mapping[str, Any]
    scores: Mapping[int, float]
    failed: Sequence[int] = ()
    waiting: Sequence[int] = ()

    @property
    def mean(self) -> float | None:
        """Over all seeds; None: one has none."""
        return None if self.failed or self.waiting or not self.scores else fmean(self.scores.values())


@dataclass(frozen=True)
class TunedRecipe:
    """All that was tried for a recipe.

    Attributes:
        score: that chooses; None: no run has ended.
        fraction: of the training images that it was taken on.
    """

    recipe: str
    score: TableColumn | None
    trials: Sequence[Trial]
    fraction: float

    @property
    def chosen(self) -> Trial | None:
        """The best, the first of equals; None: no settings have a score of every seed, or some runs have not ended."""
        if self.score is None or any(trial.waiting for trial in self.trials):
            return None
        tried = [trial for trial in self.trials if trial.mean is not None]
        best = min if self.score.lower_is_better else max
        return best(tried, key=lambda trial: trial.mean or 0.0, default=None)

    @property
    def at_edge(self) -> list[str]:
        """Keys whose chosen value is the first or last of several numbers: a better one may lie beyond."""
        if (chosen := self.chosen) is None:
            return []
        tried = {key: [trial.settings[key] for trial in self.trials] for key in chosen.settings}
        numbers = {
            key: values for key, values in tried.items() if len(set(values)) > 2 and all(map(_is_number, values))
        }
        return [key for key, values in numbers.items() if chosen.settings[key] in (min(values), max(values))]


def read_grid(tune: Sequence[str]) -> dict[str, list[Any]]:
    """Values by key, of `--tune`.

    Raises:
        ConfigError: no key and values, or a key that is given twice.
    """
    grid: dict[str, list[Any]] = {}
    for text in tune:
        key, values = read_values(text)
        if key in grid:
            raise ConfigError(f"--tune {key} is given twice; expected all of its values at once")
        grid[key] = values
    return grid


def read_scores(text: str | None) -> tuple[str, ...]:
    """The scores of `--tune-by`, with commas between them; none: by default."""
    return tuple(text.split(",")) if text else ()


def search(
    recipes: Sequence[Recipe],
    grid: Mapping[str, Sequence[Any]],
    by: Sequence[str],
    seeds: Sequence[int] | None,
    rounds: int | None,
    out: Path,
) -> tuple[Tuning, list[ExperimentJob]]:
    """The jobs of a search, and what it is about.

    Raises:
        ConfigError: a recipe cannot have a key or value, or has data without a validation part.
    """
    settings = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    tried = [(recipe, values, with_settings(_validated(recipe), values)) for recipe in recipes for values in settings]
    for score in by:
        check_metric(score, [recipe for _, _, recipe in tried])
    jobs = plan_jobs(
        [one for _, _, one in tried], seeds, rounds, out, {one.name: PREFIX + one.name for _, _, one in tried}
    )
    candidates = tuple(
        Candidate(
            recipe=recipe.name,
            settings=values,
            jobs=tuple(job.name for job in jobs if job.recipe.name == one.name),
        )
        for recipe, values, one in tried
    )
    return Tuning(by=tuple(by), candidates=candidates), jobs


def outcome(tuning: Tuning, out: Path) -> list[TunedRecipe]:
    """What a search has found so far, by recipe.

    Raises:
        ConfigError: the runs of a recipe have none of the scores that were to choose.
    """
    jobs = {name: ExperimentJob.claimed(out / name) for one in tuning.candidates for name in one.jobs}
    results = {name: result for name, job in jobs.items() if (result := job.result()) is not None}
    runs = {name: summarise(result) for name, result in results.items()}
    common = [metric for metric in JUDGED_BY if runs and all(metric in run.sites for run in runs.values())]
    candidates: dict[str, list[Candidate]] = {}
    for one in tuning.candidates:
        candidates.setdefault(one.recipe, []).append(one)
    return [_tuned(tried, jobs, runs, tuning.by or common[:1]) for tried in candidates.values()]


def _tuned(
    candidates: Sequence[Candidate],
    jobs: Mapping[str, ExperimentJob],
    runs: Mapping[str, Summary],
    scores: Sequence[str],
) -> TunedRecipe:
    """What the candidates of one recipe reached, by the first of the scores that their runs have."""
    recipe = candidates[0].recipe
    own = [runs[name] for one in candidates for name in one.jobs if name in runs]
    score = _score(recipe, scores, own) if own else None
    trials = [_trial(one, jobs, runs, score) for one in candidates]
    data = jobs[candidates[0].jobs[0]].recipe.data
    fraction = (None if data is None else data.validation_fraction) or FRACTION
    return TunedRecipe(recipe, score, trials, fraction)


def tuned(recipes: Sequence[Recipe], choices: Sequence[TunedRecipe]) -> tuple[list[Recipe], dict[str, str]]:
    """The recipes with the settings that were chosen, on all training images; what their jobs' folders are called.

    Raises:
        RunFailedError: of a recipe no settings have a score of every seed.
    """
    chosen = {one.recipe: one.chosen for one in choices}
    if without := [name for name, trial in chosen.items() if trial is None]:
        raise RunFailedError(
            f"{without[0]}: none of the settings that were tried has a score of every seed; try others with --tune"
        )
    settings = {name: dict(trial.settings) for name, trial in chosen.items() if trial is not None}
    final = {one.name: _on_all(with_settings(one, settings[one.name], rename=False)) for one in recipes}
    folders = {one.name: with_settings(one, settings[one.name]).name for one in recipes}
    return list(final.values()), folders


def _validated(recipe: Recipe) -> Recipe:
    """The recipe, scored on a validation part."""
    if recipe.data is None:
        raise ConfigError(f"recipe '{recipe.name}' has no [data]; a simulation needs to know what its sites hold")
    if recipe.data.local_test_fraction is not None:
        raise ConfigError(
            f"recipe '{recipe.name}' holds out test images of each site (data.local_test_fraction), so it cannot have "
            "a validation part, too. Compare it without --tune, or remove data.local_test_fraction"
        )
    fraction = recipe.data.validation_fraction or FRACTION
    return with_settings(recipe, {"data.validation_fraction": fraction}, rename=False)


def _on_all(recipe: Recipe) -> Recipe:
    return with_settings(recipe, {"data.validation_fraction": None}, rename=False)


def _score(recipe: str, scores: Sequence[str], runs: Sequence[Summary]) -> TableColumn:
    having = (score for score in scores if all(score.partition(":")[0] in run.sites for run in runs))
    if (score := next(having, None)) is None:
        expected = ", ".join(scores) or "none that all recipes have"
        raise ConfigError(f"the runs of {recipe} have no score that could choose ({expected}); name one with --tune-by")
    return named(score, runs)


def _trial(
    one: Candidate, jobs: Mapping[str, ExperimentJob], runs: Mapping[str, Summary], score: TableColumn | None
) -> Trial:
    seeds = {name: jobs[name].recipe.seed for name in one.jobs}
    read = {seeds[name]: None if score is None else score.read(runs[name]) for name in one.jobs if name in runs}
    scores = {seed: value for seed, value in read.items() if value is not None}
    unfinished = [name for name in one.jobs if name not in runs]
    failed = [seeds[name] for name in unfinished if jobs[name].failure() is not None]
    unscored = [seed for seed, value in read.items() if value is None]
    waiting = [seeds[name] for name in unfinished if seeds[name] not in failed]
    return Trial(one.settings, scores, [*failed, *unscored], waiting)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
