"""Jobs of a comparison side by side, wherever they run: by default as processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from protofed.deploy.experiments.experiment import LOG, ExperimentJob
from protofed.deploy.progress import bars_for, end, interruption, start_module

_LOOK_S = 0.1


@dataclass(frozen=True)
class JobProgress:
    """How a job gets on.

    Attributes:
        rounds_done: so far.
        ended: it runs no more.
        failure: why it failed, if it did.
    """

    job: ExperimentJob
    rounds_done: int
    doing: str
    ended: bool = False
    failure: str | None = None


class Place(Protocol):
    """Where jobs run, each with one thread a process."""

    def start(self, job: ExperimentJob) -> None:
        """Begin a job, or go on with it; when it ends well, its folder has its result."""

    def look(self) -> Iterable[JobProgress]:
        """Of every job that was started and had not ended at the last look."""

    def end(self) -> None:
        """Leave none of them running; all that is done of them may be lost but results."""


def run_jobs(
    jobs: Sequence[ExperimentJob], at_once: int, place: Place, *, quiet: bool = False
) -> dict[ExperimentJob, str]:
    """Run the jobs that have no result yet, `at_once` side by side; why jobs failed, of those that did.

    Args:
        quiet: show no progress.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; no process is left, and the same jobs go on from what the place has kept.
    """
    waiting = deque(job for job in jobs if not is_done(job))
    running: set[ExperimentJob] = set()
    failures: dict[ExperimentJob, str] = {}
    console = Console(stderr=True, quiet=quiet)
    with interruption() as check, CompareView(jobs, set(waiting), console) as view:
        try:
            while waiting or running:
                check()
                if waiting and len(running) < at_once:
                    place.start(job := waiting.popleft())
                    running.add(job)
                    view.started(job)
                for news in list(place.look()):
                    view.moved(news.job, news.rounds_done, news.doing)
                    if news.ended:
                        running.remove(news.job)
                        if news.failure is not None:
                            failures[news.job] = news.failure
                        view.ended(news.job, news.failure)
                time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            view.say("interrupted; the same command goes on from here")
            raise
        finally:
            place.end()
    return failures


@dataclass
class Processes:
    """This machine: a process a job, which goes on in the job's folder from where an earlier one was.

    Attributes:
        workers: processes that compute for the sites of each job.
    """

    device: str
    workers: int = 1
    _workers: dict[ExperimentJob, Worker] = field(default_factory=dict)

    def start(self, job: ExperimentJob) -> None:
        """As a process of its own."""
        self._workers[job] = Worker.start(job.folder, self.device, self.workers)

    def look(self) -> list[JobProgress]:
        """What the processes have reported since."""
        news = [self._look(job, worker) for job, worker in self._workers.items()]
        for update in news:
            if update.ended:
                del self._workers[update.job]
        return news

    def end(self) -> None:
        """Tell all processes to stop, and wait until they have."""
        end([worker.process for worker in self._workers.values()])

    def _look(self, job: ExperimentJob, worker: Worker) -> JobProgress:
        ended = worker.process.poll() is not None
        worker.listen()
        return JobProgress(job, worker.rounds_done, worker.doing, ended, worker.failure() if ended else None)


@dataclass
class Worker:
    """The process of a job's folder, and what it reported last."""

    process: subprocess.Popen[bytes]
    rounds_done: int = 0
    doing: str = "starting"
    _failed: str | None = None
    _unread: bytes = field(default=b"", repr=False)

    @classmethod
    def start(cls, folder: Path, device: str, workers: int = 1, **environment: str) -> Worker:
        """With its log in the job's folder; it ends when its standard input does, which is ours."""
        pipes: dict[str, Any] = {"bufsize": 0, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = ("protofed.deploy.experiments.job", folder, device, workers)
        with (folder / LOG).open("ab") as log:
            process = start_module(*command, stderr=log, env=environment, **pipes)
        assert process.stdout is not None  # noqa: S101  (a pipe)
        os.set_blocking(process.stdout.fileno(), False)
        return cls(process)

    def listen(self) -> None:
        """Take in what the process has reported since."""
        assert self.process.stdout is not None  # noqa: S101  (a pipe)
        *lines, self._unread = (self._unread + (self.process.stdout.read() or b"")).split(b"\n")
        for line in lines:
            status = json.loads(line)
            self.rounds_done, self.doing = status.get("done", self.rounds_done), status.get("doing", self.doing)
            self._failed = status.get("failed")

    def failure(self, *, resumable: bool = True) -> str | None:
        """Why the ended process failed; None if it did what it had to. `resumable`: what it had done stays."""
        self.listen()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None  # noqa: S101  (a pipe)
            pipe.close()
        code = self.process.returncode
        if code < 0:
            again = f"goes on from round {self.rounds_done}" if resumable else "begins it again"
            return f"killed by {signal.Signals(-code).name}; the same command {again}"
        return (self._failed or f"exit code {code}") if code else None


def is_done(job: ExperimentJob) -> bool:
    """Whether there is nothing left to run."""
    result = job.result()
    return result is not None and result.recipe == job.recipe


class CompareView:
    """A view of jobs; `to_run` are not done yet.

    Args:
        console: where it is shown.
    """

    def __init__(
        self, jobs: Sequence[ExperimentJob], to_run: Collection[ExperimentJob], console: Console | None = None
    ) -> None:
        self._console = console or Console(stderr=True)
        self._has_bars = self._console.is_terminal or self._console.is_jupyter
        self._bars = bars_for(
            self._console,
            TextColumn("{task.fields[name]}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(pulse_style="bar.back"),  # a waiting job's bar stands still
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
            speed_estimate_period=600,  # seconds; a round may last minutes
            disable=not self._has_bars,
        )
        self._few = len(jobs) < self._console.height - 2
        self._ended, self._count = len(jobs) - len(to_run), len(jobs)
        self._tasks = {job: self._bar(job, job not in to_run) for job in jobs}
        rounds = sum(job.recipe.rounds for job in jobs)
        self._total = self._bars.add_task(self._status, name="total", total=rounds, completed=int(self._done))

    def __enter__(self) -> CompareView:
        """Show it."""
        self._bars.start()
        if self._ended:
            self._line(f"{self._ended} of {self._count} jobs were done before")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave its last state on the screen."""
        self._bars.stop()

    def started(self, job: ExperimentJob) -> None:
        """A job's process runs."""
        self._bars.start_task(self._tasks[job])
        self._bars.update(self._tasks[job], visible=True)
        self._line(f"{job.name} started")

    def moved(self, job: ExperimentJob, rounds_done: int, doing: str) -> None:
        """A job says how many rounds it has done, and what goes on."""
        self._bars.update(self._tasks[job], completed=rounds_done, description=doing)
        self._bars.update(self._total, completed=self._done)

    def ended(self, job: ExperimentJob, failure: str | None) -> None:
        """A job's process has ended, and why it failed if it did."""
        self._ended += 1
        task = self._tasks[job]
        self._bars.update(
            task, description=f"failed: {failure}" if failure else "done", visible=self._few or bool(failure)
        )
        self._bars.stop_task(task)
        self._bars.update(self._total, description=self._status)
        seconds = self._bars.tasks[task].elapsed or 0.0
        self._line(f"{job.name} {f'failed: {failure}' if failure else 'done'} after {seconds:.0f} s, {self._status}")

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    @property
    def _status(self) -> str:
        return f"{self._ended}/{self._count} jobs"

    @property
    def _done(self) -> float:
        """Rounds of all jobs."""
        return sum(task.completed for task in self._bars.tasks if task.id in self._tasks.values())

    def _bar(self, job: ExperimentJob, finished: bool) -> TaskID:
        return self._bars.add_task(
            "done before" if finished else "waiting",
            name=job.name,
            total=job.recipe.rounds,
            completed=job.recipe.rounds if finished else 0,
            start=False,
            visible=self._few,
        )

    def _line(self, text: str) -> None:
        """For those who see no bars."""
        if not self._has_bars:
            self.say(text)
