"""One job of a comparison as a process of its own: `python -m protofed.deploy.experiments.job FOLDER DEVICE WORKERS`.

It says on standard output how it gets on, one JSON object a line, and ends when nobody listens any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from protofed.client.transfer import pick_device
from protofed.common.errors import ProtofedError, RunFailedError
from protofed.common.malloc import keep_memory
from protofed.common.storage import files
from protofed.deploy.daemons.signals import stoppable
from protofed.deploy.experiments.code_digest import code_of
from protofed.deploy.experiments.experiment import SECONDS, ExperimentJob
from protofed.deploy.experiments.finished import result_of
from protofed.deploy.experiments.machine import machine_class
from protofed.deploy.logs import setup
from protofed.deploy.simulation.run_tables import status
from protofed.deploy.simulation.simulation import NewCrew, Simulation, simulation
from protofed.deploy.simulation.worker_processes import crew_of


def run_job(
    job: ExperimentJob, device: torch.device, report: Callable[[int, str], None], crew: NewCrew | None = None
) -> None:
    """Simulate the job from where it is to its end and write its result.

    Args:
        report: called with the rounds that are done and what goes on.
        crew: as in `simulation`.

    Raises:
        ConfigError, DataError: the recipe or its data cannot be used.
        StateError: the folder is in use, or its state is another recipe's or other code's.
        RunFailedError: the run failed.
    """
    code = code_of(job.recipe)
    job.begin(code)
    clock = _Stopwatch(job.folder / SECONDS)
    report(0, "loading")
    with simulation(job.recipe, job.state, device, crew=crew) as running:
        _go(running, clock, report)
        if running.runs.failed:
            job.write_failure(why := f"{running.runs.failed[0]}{running.refused}")
            raise RunFailedError(f"run failed: {why}; remove {job.folder} to begin it again")
        job.write_result(result_of(running, clock.seconds, code, machine_class(device)))


def _go(running: Simulation, clock: _Stopwatch, report: Callable[[int, str], None]) -> None:
    noted = -1

    def turned() -> None:
        nonlocal noted
        done, doing = status(running.run.phase, running.recipe.rounds)
        report(done, doing)
        if done != noted:
            clock.note()
            noted = done

    turned()
    running.go(on_task=turned)


class _Stopwatch:
    """Wall-clock seconds over all processes that worked on a job, kept in a file; a killed one loses what it had not
    noted.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._began, self._before = file, time.monotonic(), 0.0
        with contextlib.suppress(FileNotFoundError):
            self._before = float(file.read_text(encoding="ascii"))

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._began

    def note(self) -> None:
        files.write(self._file, f"{self.seconds:.3f}".encode())


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201


def _end_with_parent() -> None:
    """Standard input is a pipe that nobody writes to: it ends when the parent does, however that came about."""

    def listen() -> None:
        while os.read(sys.stdin.fileno(), 1):  # sys.stdin's own lock would be held while the interpreter ends
            pass
        os._exit(1)  # all that counts is on disk

    threading.Thread(target=listen, daemon=True).start()


def main(folder: Path, device: str, workers: int) -> None:
    """Entry point of the process; always ends in SystemExit, unless it is asked to stop."""
    _end_with_parent()
    setup.configure()
    keep_memory()
    torch.set_num_threads(1)  # jobs side by side share the cores
    with stoppable():
        try:
            run_job(
                ExperimentJob.claimed(folder),
                pick_device(device),
                lambda done, doing: _say(done=done, doing=doing),
                crew_of(workers),
            )
            sys.exit(0)
        except ProtofedError as error:
            _say(failed=str(error))
            sys.exit(error.exit_code)
        except Exception as error:
            _say(failed=f"internal error: {type(error).__name__}: {error}")
            raise
    sys.exit(1)  # asked to stop


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
