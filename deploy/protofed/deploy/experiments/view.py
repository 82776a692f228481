"""How a comparison's jobs get on: a bar a job on a terminal and in a notebook, else a line a job on standard error."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from protofed.deploy.console.notebook import bars_for
from protofed.deploy.experiments.experiment import ExperimentJob


class CompareView:
    """A view of jobs, of which `to_run` are not done yet.

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

    def moved(self, job: ExperimentJob, done: int, doing: str) -> None:
        """A job says how many rounds it has done, and what goes on."""
        self._bars.update(self._tasks[job], completed=done, description=doing)
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

    def _bar(self, job: ExperimentJob, done: bool) -> TaskID:
        return self._bars.add_task(
            "done before" if done else "waiting",
            name=job.name,
            total=job.recipe.rounds,
            completed=job.recipe.rounds if done else 0,
            start=False,
            visible=self._few,
        )

    def _line(self, text: str) -> None:
        """For those who see no bars."""
        if not self._has_bars:
            self.say(text)
