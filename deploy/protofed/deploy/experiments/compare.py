"""`protofed compare`: recipes times seeds side by side, and what they gave as tables and curves."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, RunFailedError, unknown
from protofed.common.storage import files
from protofed.deploy.console.processes import usable_cores
from protofed.deploy.experiments.code_digest import code_of, shown
from protofed.deploy.experiments.columns import check_metric
from protofed.deploy.experiments.curves import draw
from protofed.deploy.experiments.experiment import (
    BEFORE,
    ExperimentJob,
    jobs_of,
    read_contents,
    refuse_foreign,
    write_contents,
)
from protofed.deploy.experiments.jobs import Processes, is_done, run_jobs
from protofed.deploy.experiments.ray_node import set_up
from protofed.deploy.experiments.table import FORMATS, Comparison, show

WIDTH = 200  # of tables that go into a file


@dataclass(frozen=True)
class CompareRequest:
    """What the command line asks for.

    Attributes:
        seeds, rounds: as in `jobs_of`.
        at_once: jobs side by side; None: as many as there are cores to be used, for the workers of each.
        ray: address of the Ray cluster that runs the jobs, `auto`, or `local`; None: processes of this machine do.
        gpus_per_job: of the cluster, for each job.
        format: one of FORMATS for standard output; None: a table for people.
        metrics: the only columns, by name; none: those that the results have.
        workers: processes that compute for the sites of a job.
        keep_old: jobs that other code has finished count as done, too.
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


def compare(recipes: Sequence[Recipe], request: CompareRequest) -> None:
    """Run what is not done yet, then write and print what all of it gave; without recipes, only the latter.

    Raises:
        ConfigError: the recipes cannot be compared, no result has such a metric, or there is no such format.
        StateError: the folder is in use, or holds something else.
        RunFailedError: jobs failed; the others were run and written nevertheless.
        UnavailableError: there is no such cluster.
    """
    _check(request)
    if recipes:
        for metric in request.metrics:
            check_metric(metric, recipes)
    else:
        read_contents(request.out)  # before the folder is made
    with _locked(request.out):
        failures = {}
        if recipes:
            jobs = _prepare(recipes, request)
            failures = _run(jobs, request)
        report(request)
    if failures:
        details = "".join(f"\n  {job.name}: {reason}; see {job.log}" for job, reason in failures.items())
        raise RunFailedError(f"{len(failures)} of {len(jobs)} jobs failed:{details}")


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


def report(request: CompareRequest) -> None:
    """Tables and curves of a folder's results into the folder; the table to standard output, too."""
    contents = read_contents(request.out)
    jobs = [ExperimentJob.claimed(request.out / name) for name in contents.jobs]
    comparison = Comparison.of([(job.recipe, job.result()) for job in jobs], request.metrics, contents.shortened)
    for suffix, written in FORMATS.items():
        files.write(request.out / f"table.{suffix}", written(comparison).encode(), files.PUBLIC)
    pictures = draw(comparison.results, request.out)
    if request.format is None:
        show(comparison, Console(width=None if sys.stdout.isatty() else WIDTH))
    else:
        print(FORMATS[request.format](comparison), end="")  # noqa: T201
    curves = " · curve-*.png and .svg" if pictures else ""
    Console(stderr=True).print(
        f"In {request.out}: table.md, table.csv, table.json{curves}", soft_wrap=True, highlight=False
    )


def _check(request: CompareRequest) -> None:
    """Refuse what cannot work before a folder or a process is made."""
    if request.format is not None and request.format not in FORMATS:
        raise unknown("format", request.format, FORMATS)
    if request.ray is not None:
        set_up(request.ray)
        from protofed.deploy.experiments.ray_cluster import resources

        resources(request.device, request.gpus_per_job)
        if request.workers > 1:
            raise ConfigError("--workers is for jobs of this machine; with --ray, more jobs take more cores")
    elif request.gpus_per_job is not None:
        raise ConfigError("--gpus-per-job is for --ray; without it, jobs share the --device")


def _run(jobs: Sequence[ExperimentJob], request: CompareRequest) -> dict[ExperimentJob, str]:
    cores = request.at_once or usable_cores()
    if request.ray is None or all(is_done(job) for job in jobs):
        at_once = request.at_once or max(1, cores // request.workers)
        return run_jobs(jobs, at_once, Processes(request.device, request.workers))
    from protofed.deploy.experiments.ray_cluster import cluster

    with cluster(request.ray, request.device, request.gpus_per_job, cores) as place:
        return run_jobs(jobs, request.at_once or place.room, place)


def _prepare(recipes: Sequence[Recipe], request: CompareRequest) -> list[ExperimentJob]:
    """Jobs in their folders, none of which holds anything else."""
    jobs = jobs_of(recipes, request.seeds, request.rounds, request.out)
    for job in jobs:
        job.check()
    _drop_old(jobs, keep=request.keep_old)
    longest = max(recipe.rounds for recipe in recipes)
    write_contents(request.out, jobs, request.rounds if request.rounds and request.rounds < longest else None)
    for job in jobs:
        job.claim()
    return jobs


def _drop_old(jobs: Sequence[ExperimentJob], *, keep: bool) -> None:
    """Begin those again that other code has computed, or begun, and say so.

    Args:
        keep: those that it has finished stay.
    """
    changed = {job: changes for job in jobs if (changes := job.changes(code_of(job.recipe)))}
    kept = [job for job in changed if keep and job.result() is not None]
    for job in (again := [job for job in changed if job not in kept]):
        job.begin_again()
    what = shown(list(dict.fromkeys(change for changes in changed.values() for change in changes)))
    told = Console(stderr=True)
    if again:
        hint = "" if keep else f" (scores are kept in {BEFORE}; --keep-old takes finished jobs as they are)"
        text = f"{len(again)} of {len(jobs)} jobs are run again, since other code computed them; changed: {what}{hint}"
        told.print(text, soft_wrap=True, highlight=False, markup=False)
    if kept:
        text = f"{len(kept)} of {len(jobs)} jobs are kept though other code computed them; changed: {what}"
        told.print(text, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """The folder, for this process alone."""
    refuse_foreign(out)
    lock = files.Lock(out)
    try:
        yield
    finally:
        lock.release()
