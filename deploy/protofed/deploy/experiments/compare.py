"""`protofed compare`: recipes times seeds side by side, and what they gave as tables and curves."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from protofed.common import plugins
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, RunFailedError, count, unknown
from protofed.common.storage import files
from protofed.deploy.experiments.code_digest import InstalledCode, shown
from protofed.deploy.experiments.curves import Curves, collect_curves, draw
from protofed.deploy.experiments.experiment import (
    ExperimentContents,
    ExperimentJob,
    Result,
    plan_jobs,
    read_contents,
    refuse_foreign,
    write_contents,
)
from protofed.deploy.experiments.jobs import Processes, is_done, run_jobs
from protofed.deploy.experiments.ray_node import set_up
from protofed.deploy.experiments.shown import FORMATS, show
from protofed.deploy.experiments.summary import Target, check_metric
from protofed.deploy.experiments.table import CompareOptions, Comparison
from protofed.deploy.experiments.tuning import outcome, search, tuned
from protofed.deploy.progress import usable_cores

WIDTH = 200  # of tables that go into a file
PAGE = "page.html"
# Of a comparison, its curves and the command that made it: HTML.
MakePage: TypeAlias = Callable[[Comparison, Sequence[Curves], str], str]


@dataclass(frozen=True)
class CompareRequest:
    """What the command line asks for.

    Attributes:
        seeds, rounds: as in `plan_jobs`.
        at_once: jobs side by side; None: as many as there are cores to be used, for the workers of each.
        ray: address of the Ray cluster that runs the jobs, `auto`, or `local`; None: processes of this machine do.
        gpus_per_job: of the cluster, for each job.
        format: one of FORMATS for standard output; None: a table for people.
        metrics: the only columns, by name; none: those that the results have.
        workers: processes that compute for the sites of a job.
        keep_old: jobs that other code has finished count as done, too.
        against: the recipe that the others are compared with; None: the first.
        reach: a score that is to be reached, as of `Target.read`; None: none.
        grid: values by key, of which each recipe's are chosen first; empty: none.
        tune_by: scores that choose, as of `Tuning`.
        tune_seeds: of the runs that choose; None: those that are compared.
        command: what computes the same, without paths.
    """

    out: Path
    seeds: Sequence[int] | None = None
    rounds: int | None = None
    at_once: int | None = None
    device: str = "cpu"
    format: str | None = None
    metrics: Sequence[str] = ()
    ray: str | None = None
    gpus_per_job: float | None = None
    workers: int = 1
    keep_old: bool = False
    against: str | None = None
    reach: str | None = None
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tune_by: Sequence[str] = ()
    tune_seeds: Sequence[int] | None = None
    command: str = ""

    @property
    def tuned_on(self) -> Sequence[int] | None:
        """The seeds of the search, as in `plan_jobs`."""
        return self.seeds if self.tune_seeds is None else self.tune_seeds


def compare(recipes: Sequence[Recipe], request: CompareRequest, page: MakePage | None = None) -> None:
    """Run what is not done yet, then write and print all results; without recipes, only the latter.

    Args:
        page: makes `page.html`; None: none is written.

    Raises:
        ConfigError: the recipes cannot be compared, no result has such a metric, or there is no such format.
        StateError: the folder is in use, or holds something else.
        RunFailedError: jobs failed; the others were run and written nevertheless.
        UnavailableError: there is no such cluster.
    """
    plugins.allow(name for recipe in recipes for name in recipe.names)  # a task's scores are looked up here, too
    _check(recipes, request)
    if not recipes:
        read_contents(request.out)  # before the folder is made
    with _locked(request.out):
        failures: dict[ExperimentJob, str] = {}
        count = 0
        try:
            if recipes:
                failures, count = _run_all(recipes, request)
        except RunFailedError:
            report(request, page)
            raise
        report(request, page)
    if failures:
        details = "".join(f"\n  {job.name}: {reason}; see {job.log}" for job, reason in failures.items())
        raise RunFailedError(f"{len(failures)} of {count} jobs failed:{details}")


def read_seeds(text: str | None) -> list[int] | None:
    """Seeds as the command line has them: `0,1,2`.

    Raises:
        ConfigError: they are no such numbers.
    """
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise ConfigError(f"seeds '{text}': expected numbers from 0 with commas between them, such as 0,1,2")
    return [int(seed) for seed in text.split(",")]


def report(request: CompareRequest, page: MakePage | None = None) -> None:
    """Tables, curves and page of a folder's results into the folder; the table to standard output, too."""
    contents = read_contents(request.out)
    jobs = [ExperimentJob.claimed(request.out / name) for name in contents.jobs]
    results = [(job.recipe, job.result()) for job in jobs]
    comparison = Comparison.of(results, _options(contents, results, request))
    for suffix, written in FORMATS.items():
        files.write(request.out / f"table.{suffix}", written(comparison).encode(), files.PUBLIC)
    curves = collect_curves(comparison.results)
    draw(curves, request.out)
    if page is not None:
        files.write(request.out / PAGE, page(comparison, curves, _command(contents, request)).encode(), files.PUBLIC)
    if request.format is None:
        show(comparison, Console(width=None if sys.stdout.isatty() else WIDTH))
    else:
        print(FORMATS[request.format](comparison), end="")  # noqa: T201
    names = [PAGE] if page is not None else []
    names += ["table.md", "table.csv", "table.json", *(["curve-*.png and .svg"] if curves else [])]
    _say(f"In {request.out}: {', '.join(names)}")


def _command(contents: ExperimentContents, request: CompareRequest) -> str:
    """What computes and shows the same."""
    shown_by = [("--against", request.against or contents.against), ("--reach", request.reach or contents.reach)]
    shown_by += [("--metric", metric) for metric in request.metrics]
    return " ".join([contents.command, *(f"{name} {value}" for name, value in shown_by if value)]).strip()


def _options(
    contents: ExperimentContents, results: Sequence[tuple[Recipe, Result | None]], request: CompareRequest
) -> CompareOptions:
    """How the folder's results are compared: as asked now, or else as when they were computed."""
    reach = request.reach or contents.reach
    other, code = dict[str, list[int]](), InstalledCode()
    for recipe, result in results:
        if result is not None and code.of(recipe).changes(result.code):
            other.setdefault(recipe.name, []).append(recipe.seed)
    against = request.against or contents.against
    if against is not None and against not in (names := {recipe.name for recipe, _ in results}) and results:
        raise unknown("recipe of this comparison", against, names)
    return CompareOptions(
        metrics=request.metrics,
        against=against,
        target=None if reach is None else Target.read(reach),
        shortened=contents.shortened,
        tuned=[] if contents.tuning is None else outcome(contents.tuning, request.out),
        other_code=other,
    )


def _check(recipes: Sequence[Recipe], request: CompareRequest) -> None:
    """Refuse what cannot work before a folder or a process is made."""
    if request.format is not None and request.format not in FORMATS:
        raise unknown("format", request.format, FORMATS)
    if recipes:
        for metric in (*request.metrics, *([Target.read(request.reach).score] if request.reach else [])):
            check_metric(metric, recipes)
        if request.against is not None and request.against not in (names := {recipe.name for recipe in recipes}):
            raise unknown("recipe of this comparison", request.against, names)
    if request.tune_by and not request.grid:
        raise ConfigError("--tune-by chooses among the values of --tune; add that, or remove it")
    if request.tune_seeds is not None and not request.grid:
        raise ConfigError("--tune-seeds are of the runs of --tune; add that, or remove it")
    _check_workers(request)


def _check_workers(request: CompareRequest) -> None:
    if request.ray is not None:
        set_up(request.ray, request.device, request.gpus_per_job)
        if request.workers > 1:
            raise ConfigError("--workers is for jobs of this machine; with --ray, more jobs take more cores")
    elif request.gpus_per_job is not None:
        raise ConfigError("--gpus-per-job is for --ray; without it, jobs share the --device")


def _run_all(recipes: Sequence[Recipe], request: CompareRequest) -> tuple[dict[ExperimentJob, str], int]:
    """Run the search, if there is one, and then what is compared; the jobs that failed, of how many.

    Raises:
        RunFailedError: no settings of a recipe have a score of every seed.
    """
    longest = max(recipe.rounds for recipe in recipes)
    contents = ExperimentContents(
        shortened=request.rounds if request.rounds and request.rounds < longest else None,
        against=request.against,
        reach=request.reach,
        command=request.command,
    )
    compared, folders = list(recipes), dict[str, str]()
    if request.grid:
        search_args = request.grid, request.tune_by, request.tuned_on, request.rounds, request.out
        tuning, tried = search(recipes, *search_args)
        contents = contents.model_copy(update={"tuning": tuning})
        _prepare(tried, contents, request)
        _say(f"first a search on a validation part: {count(len(tried), 'run')}")
        unsettled = [job for job in tried if job.failure() is None]
        failed = {job: why for job, why in _run(unsettled, request).items() if job.failure() is None}
        if failed:
            return failed, len(tried)
        compared, folders = tuned(recipes, outcome(tuning, request.out))
    jobs = plan_jobs(compared, request.seeds, request.rounds, request.out, folders)
    _prepare(jobs, contents.model_copy(update={"jobs": tuple(job.name for job in jobs)}), request)
    return _run(jobs, request), len(jobs)


def _run(jobs: Sequence[ExperimentJob], request: CompareRequest) -> dict[ExperimentJob, str]:
    cores = request.at_once or usable_cores()
    if request.ray is None or all(is_done(job) for job in jobs):
        at_once = request.at_once or max(1, cores // request.workers)
        return run_jobs(jobs, at_once, Processes(request.device, request.workers))
    from protofed.deploy.experiments.ray_cluster import Tasks, joined

    with joined(request.ray, request.device, request.gpus_per_job, cores) as cluster:
        return run_jobs(jobs, request.at_once or cluster.room, Tasks(cluster))


def _prepare(jobs: Sequence[ExperimentJob], contents: ExperimentContents, request: CompareRequest) -> None:
    """Jobs in their folders. No folder holds anything else, or what other code has computed."""
    for job in jobs:
        job.check()
    _drop_old(jobs, keep=request.keep_old)
    write_contents(request.out, contents)
    for job in jobs:
        job.claim()


def _drop_old(jobs: Sequence[ExperimentJob], *, keep: bool) -> None:
    """Begin those again that other code has computed, or started, and say so.

    Args:
        keep: those that it has finished stay.
    """
    code = InstalledCode()
    changed = {job: changes for job in jobs if (changes := job.changes(code.of(job.recipe)))}
    retained = [job for job in changed if keep and job.result() is not None]
    for job in (again := [job for job in changed if job not in retained]):
        job.begin_again()
    what = shown(list(dict.fromkeys(change for changes in changed.values() for change in changes)))
    if again:
        hint = (
            ""
            if keep
            else " (old ones stay as result-before-… and state-before-…; --keep-old takes finished jobs as they are)"
        )
        _say(f"{len(again)} of {len(jobs)} jobs are run again, because other code computed them; changed: {what}{hint}")
    if retained:
        _say(f"{len(retained)} of {len(jobs)} jobs are kept though other code computed them; changed: {what}")


def _say(text: str) -> None:
    Console(stderr=True).print(text, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """The folder, for this process alone."""
    refuse_foreign(out)
    lock = files.Lock(out)
    try:
        yield
    finally:
        lock.release()
