"""`protofed compare`: recipes times seeds side by side on this machine, and what they gave as tables and curves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from protofed.common import archive
from protofed.common.errors import ConfigError, unknown
from protofed.common.recipe import Recipe
from protofed.deploy.children import end, interruption
from protofed.deploy.compare_table import FORMATS, Comparison, show
from protofed.deploy.compare_view import View
from protofed.deploy.curves import draw
from protofed.deploy.experiment import Job, jobs_of, read_contents, refuse_foreign, write_contents
from protofed.deploy.server_process import RunsFailedError

_LOOK_S = 0.1
WIDTH = 200  # of tables that go into a file


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for.

    Attributes:
        seeds, rounds: as in `jobs_of`.
        at_once: jobs side by side; None: as many as there are cores to be used.
        format: one of FORMATS for standard output; None: a table for people.
        metrics: the only columns, by name; none: those that the results have.
    """

    out: Path
    seeds: Sequence[int] | None = None
    rounds: int | None = None
    at_once: int | None = None
    device: str = "cpu"
    format: str | None = None
    metrics: Sequence[str] = ()


def compare(recipes: Sequence[Recipe], wanted: Wanted) -> None:
    """Run what is not done yet, then write and print what all of it gave; without recipes, only the latter.

    Raises:
        ConfigError: the recipes cannot be compared, no result has such a metric, or there is no such format.
        StateError: the folder is in use, or holds something else.
        RunsFailedError: jobs failed; the others were run and written nevertheless.
    """
    if wanted.format is not None and wanted.format not in FORMATS:
        raise unknown("format", wanted.format, FORMATS)
    if not recipes:
        read_contents(wanted.out)  # before the folder is made
    with _opened(wanted.out):
        failures = {}
        if recipes:
            jobs = _prepare(recipes, wanted)
            failures = run_jobs(jobs, wanted.at_once or _cores(), wanted.device)
        report(wanted)
    if failures:
        told = "".join(f"\n  {job.name}: {why}; see {job.log}" for job, why in failures.items())
        raise RunsFailedError(f"{len(failures)} of {len(jobs)} jobs failed:{told}")


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


def report(wanted: Wanted) -> None:
    """Tables and curves of a folder's results into the folder; the table to standard output, too."""
    contents = read_contents(wanted.out)
    jobs = [Job.claimed(wanted.out / name) for name in contents.jobs]
    comparison = Comparison.of([(job.recipe, job.result()) for job in jobs], wanted.metrics, contents.shortened)
    for suffix, written in FORMATS.items():
        archive.write(wanted.out / f"table.{suffix}", written(comparison).encode())
    pictures = draw(comparison.results, wanted.out)
    if wanted.format is None:
        show(comparison, Console(width=None if sys.stdout.isatty() else WIDTH))
    else:
        print(FORMATS[wanted.format](comparison), end="")  # noqa: T201
    curves = " · curve-*.png and .svg" if pictures else ""
    Console(stderr=True).print(
        f"In {wanted.out}: table.md, table.csv, table.json{curves}", soft_wrap=True, highlight=False
    )


def run_jobs(jobs: Sequence[Job], at_once: int, device: str) -> dict[Job, str]:
    """Run the jobs that have no result yet, `at_once` side by side; why jobs failed, of those that did.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; no process is left, and the same jobs go on from where they were.
    """
    waiting = deque(job for job in jobs if not _is_done(job))
    failures: dict[Job, str] = {}
    workers: list[Worker] = []
    with interruption() as check, View(jobs, set(waiting)) as view:
        try:
            while waiting or workers:
                check()
                if waiting and len(workers) < at_once:
                    workers.append(Worker.start(waiting.popleft(), device))
                    view.started(workers[-1].job)
                for worker in workers:
                    worker.listen()
                    view.moved(worker.job, worker.done, worker.doing)
                for worker in [worker for worker in workers if worker.process.poll() is not None]:
                    workers.remove(worker)
                    if (why := worker.failure()) is not None:
                        failures[worker.job] = why
                    view.ended(worker.job, why)
                time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            view.say("interrupted; the same command goes on from here")
            raise
        finally:
            end([worker.process for worker in workers])
    return failures


@dataclass
class Worker:
    """One job's process, and what it said last."""

    job: Job
    process: subprocess.Popen[bytes]
    done: int = 0
    doing: str = "starting"
    _failed: str | None = None
    _unread: bytes = field(default=b"", repr=False)

    @classmethod
    def start(cls, job: Job, device: str) -> Worker:
        """With one thread, its log in the job's folder, and in a session of its own: Ctrl-C reaches only us."""
        command = [sys.executable, "-m", "protofed.deploy.experiment_job", str(job.folder), device]
        with job.log.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603
                command,
                bufsize=0,
                stdin=subprocess.PIPE,  # it ends when we do
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        assert process.stdout is not None  # noqa: S101  (a pipe)
        os.set_blocking(process.stdout.fileno(), False)
        return cls(job, process)

    def listen(self) -> None:
        """Take in what the process has said since."""
        assert self.process.stdout is not None  # noqa: S101  (a pipe)
        *lines, self._unread = (self._unread + (self.process.stdout.read() or b"")).split(b"\n")
        for line in lines:
            said = json.loads(line)
            self.done, self.doing = said.get("done", self.done), said.get("doing", self.doing)
            self._failed = said.get("failed")

    def failure(self) -> str | None:
        """Why the ended process failed; None if it did what it had to."""
        self.listen()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None  # noqa: S101  (a pipe)
            pipe.close()
        code = self.process.returncode
        if code < 0:
            return f"killed by {signal.Signals(-code).name}; the same command goes on from round {self.done}"
        return (self._failed or f"exit code {code}") if code else None


def _prepare(recipes: Sequence[Recipe], wanted: Wanted) -> list[Job]:
    """Jobs in their folders, none of which holds anything else."""
    jobs = jobs_of(recipes, wanted.seeds, wanted.rounds, wanted.out)
    for job in jobs:
        job.check()
    longest = max(recipe.rounds for recipe in recipes)
    write_contents(wanted.out, jobs, wanted.rounds if wanted.rounds and wanted.rounds < longest else None)
    for job in jobs:
        job.claim()
    return jobs


def _is_done(job: Job) -> bool:
    result = job.result()
    return result is not None and result.recipe == job.recipe


@contextmanager
def _opened(out: Path) -> Iterator[None]:
    """The folder, for this process alone."""
    refuse_foreign(out)
    lock = archive.Lock(out)
    try:
        yield
    finally:
        lock.release()


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
