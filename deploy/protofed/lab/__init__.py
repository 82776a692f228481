"""protofed in a notebook: recipes with overrides, simulations and comparisons, their scores as pandas frames."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from protofed.common.version import install_hint

try:
    import pandas as pd

    from protofed.client.device import pick_device
    from protofed.deploy.experiments.curves import FAMILIES, over_rounds
    from protofed.deploy.experiments.job import run_job
    from protofed.deploy.plots import NotebookFigure, lines
    from protofed.deploy.progress import usable_cores
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    hint = f"{missing} is not installed, which notebooks need: {install_hint('lab')}"
    raise ModuleNotFoundError(hint, name=error.name) from error

from protofed.common.config.recipe import Recipe, parse
from protofed.common.config.toml_files import parse_toml
from protofed.common.errors import ConfigError, RunFailedError, count
from protofed.deploy import shipped
from protofed.deploy.experiments.experiment import ExperimentJob, Result, plan_jobs
from protofed.deploy.experiments.jobs import Processes, run_jobs
from protofed.deploy.progress import progress
from protofed.deploy.shipped import from_keywords, with_overrides

_MAIN_SCORES = {
    "global accuracy": "global.accuracy",
    "own models PM(V)": "personal.pm_v",
    "PM(L)": "personal.pm_l",
}
__all__ = ["ComparisonResult", "SimulationResult", "compare", "load_recipe", "simulate"]


@dataclass(frozen=True, repr=False)
class ComparisonResult:
    """Finished runs, by recipe's name one for each seed."""

    results: Mapping[str, Sequence[Result]]

    @property
    def scores(self) -> pd.DataFrame:
        """A row a recipe, seed, round and site; a column a score, NaN where a site does not report it."""
        rows = [
            {"recipe": name, "seed": result.recipe.seed, "round": round_, "site": site, **scores}
            for name, results in self.results.items()
            for result in results
            for round_, sites in result.scores.items()
            for site, scores in sites.items()
        ]
        return pd.DataFrame(rows).set_index(["recipe", "seed", "round", "site"])

    def curves(self) -> pd.DataFrame:
        """A row a recipe and round: each score's mean over sites, as (score, `mean`) and (score, `std`) over seeds."""
        seeds = self.scores.groupby(["recipe", "seed", "round"], sort=False).mean()
        return seeds.groupby(["recipe", "round"], sort=False).agg(["mean", "std"])

    def figure(self, metric: str = "global.accuracy") -> NotebookFigure:
        """A line a recipe: a score in percent over rounds, with a band over seeds.

        Raises:
            ConfigError: no run has such a score.
        """
        curves = {name: over_rounds(results, metric) for name, results in self.results.items()}
        series = {name: curve for name, curve in curves.items() if curve is not None}
        if not series:
            raise ConfigError(f"no run has the score '{metric}'; expected one of {', '.join(self.scores.columns)}")
        return lines(series, FAMILIES.get(metric, metric))

    def __repr__(self) -> str:
        runs = [f"{name}: {count(len(results), 'run')}; {_summary(results)}" for name, results in self.results.items()]
        return "\n".join([f"{type(self).__name__}", *(f"  {run}" for run in runs)])

    def _repr_html_(self) -> str:
        return str(self.curves().groupby("recipe", sort=False).tail(1).to_html(float_format="{:.4f}".format))


@dataclass(frozen=True, repr=False)
class SimulationResult(ComparisonResult):
    """One finished run."""

    @property
    def result(self) -> Result:
        """As `compare` keeps it."""
        return next(iter(self.results.values()))[0]

    @property
    def recipe(self) -> Recipe:
        """That was run, overrides among it."""
        return self.result.recipe

    @property
    def digest(self) -> str:
        """Of the last published state; equal for equal runs on one kind of machine."""
        return str(self.result.state)

    @property
    def scores(self) -> pd.DataFrame:
        """A row a round and site; a column a score, NaN where a site does not report it."""
        return super().scores.droplevel(["recipe", "seed"])

    def curves(self) -> pd.DataFrame:
        """A row a round; each score's mean over the sites that report it."""
        return self.scores.groupby("round").mean()

    def __repr__(self) -> str:
        return f"SimulationResult({self.recipe.name}; {_summary([self.result])})"

    def _repr_html_(self) -> str:
        return str(self.curves().tail(1).to_html(float_format="{:.4f}".format))


def load_recipe(recipe: str | Path | Recipe, **overrides: Any) -> Recipe:
    """A recipe by its file, the name of one that comes with protofed, or its TOML text (of more than one line).

    Args:
        overrides: `plan__lr=0.1`, `plan={"lr": 0.1}` or `**{"plan.lr": 0.1}`.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    if isinstance(recipe, str) and "\n" in recipe:
        recipe = parse(parse_toml(recipe, "the recipe's text is not TOML"), Recipe, "recipe")
    read = recipe if isinstance(recipe, Recipe) else shipped.recipe(str(recipe))
    return with_overrides(read, from_keywords(overrides))


def simulate(
    recipe: str | Path | Recipe, *, device: str = "cpu", quiet: bool = False, **overrides: Any
) -> SimulationResult:
    """Run a recipe in this process, as `protofed simulate` does.

    Args:
        quiet: show no progress.
        overrides: as of `load_recipe`.

    Raises:
        ConfigError, DataError: the recipe or its data cannot be used.
        RunFailedError: the run failed.
    """
    read = load_recipe(recipe, **overrides)
    with (
        tempfile.TemporaryDirectory(prefix="protofed-") as folder,
        _only_warnings_logged(),
        progress(read.name, read.rounds, "rounds", visible=not quiet, stays=True) as bar,
    ):
        (job,) = plan_jobs([read], None, None, Path(folder))
        job.claim()
        run_job(job, pick_device(device), bar.to)
        return SimulationResult({read.name: [_result(job)]})


def compare(
    recipes: Sequence[str | Path | Recipe],
    seeds: Sequence[int] | None = None,
    *,
    device: str = "cpu",
    quiet: bool = False,
    **overrides: Any,
) -> ComparisonResult:
    """Run recipes times seeds side by side in processes of their own, as `protofed compare` does.

    Args:
        seeds: of runs and data; None: the recipes' own.
        quiet: show no progress.
        overrides: of every recipe, as of `load_recipe`.

    Raises:
        ConfigError: the recipes cannot be compared.
        RunFailedError: a run failed.
    """
    read = [load_recipe(recipe, **overrides) for recipe in recipes]
    with tempfile.TemporaryDirectory(prefix="protofed-") as folder:
        jobs = plan_jobs(read, seeds, None, Path(folder))
        for job in jobs:
            job.claim()
        if failures := run_jobs(jobs, usable_cores(), Processes(device), quiet=quiet):
            raise RunFailedError("; ".join(f"{job.name}: {why}" for job, why in failures.items()))
        return ComparisonResult(
            {one.name: [_result(job) for job in jobs if job.recipe.name == one.name] for one in read}
        )


def _summary(results: Sequence[Result]) -> str:
    """Rounds and main scores of runs, which are all complete: else they have no result. Means over sites and seeds."""
    rounds = sorted({max(result.cohorts, default=0) for result in results})
    span = " to ".join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))
    parts = [f"completed, {span} of {results[0].recipe.rounds} rounds"]
    for label, name in _MAIN_SCORES.items():
        if (curve := over_rounds(results, name)) is not None:
            parts.append(f"{label} {100 * curve[1][:, -1].mean():.1f} %")
    return ", ".join(parts)


@contextmanager
def _only_warnings_logged() -> Iterator[None]:
    """The log of a run would fill the cell; how the notebook's own code logs is not changed for good."""
    was_configured, before = structlog.is_configured(), structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        yield
    finally:
        if was_configured:
            structlog.configure(**before)
        else:
            structlog.reset_defaults()


def _result(job: ExperimentJob) -> Result:
    result = job.result()
    assert result is not None  # noqa: S101  (it was just run)
    return result
