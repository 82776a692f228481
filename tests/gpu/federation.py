"""One recipe's simulation as a process: `… federation JOB`, a JSON file; it writes its progress every ten rounds."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog
import torch

from protofed.common.config.recipe import Recipe
from protofed.common.errors import RunFailedError
from protofed.common.process import keep_memory
from protofed.common.protocol.scores import spreads
from protofed.deploy import shipped
from protofed.deploy.shipped import with_overrides
from protofed.deploy.simulation.run_tables import status
from protofed.deploy.simulation.simulation import Simulation, simulation

EVERY = 10  # rounds between two writings


@dataclass(frozen=True)
class Job:
    """What a process is to do.

    Attributes:
        recipe: name of a shipped one.
        overrides: as nested tables.
        deadline: monotonic seconds, at which it ends, finished or not. All processes of a machine share this clock.
        progress: the file that it writes.
    """

    recipe: str
    seed: int
    overrides: Mapping[str, Any]
    device: str
    deadline: float
    progress: str

    def prepared(self) -> Recipe:
        """The recipe with this seed, of the run and of the partition.

        Raises:
            ConfigError: it cannot be used.
        """
        recipe = with_overrides(shipped.recipe(self.recipe), {"seed": self.seed, "data": {"seed": self.seed}})
        return with_overrides(recipe, self.overrides)


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        rounds: published so far.
        of: that the recipe has.
        seconds: since the data were loaded.
        scores: in fractions, by scored round and name: means over those that report them.
    """

    recipe: str
    seed: int
    of: int
    rounds: int = 0
    seconds: float = 0.0
    ended: bool = False
    scores: dict[int, dict[str, float]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Replace the file at once."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(temporary, path)

    @classmethod
    def read(cls, path: Path) -> Progress | None:
        """What the file says; None: it is not there yet."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return cls(**{**fields, "scores": {int(number): scores for number, scores in fields["scores"].items()}})


class _TimeIsUpError(Exception):
    """The job's deadline has come."""


def run(job: Job) -> Progress:
    """Simulate until the run's end, or the job's.

    Raises:
        ConfigError, DataError: the recipe or its data cannot be used.
        RunFailedError: the run failed.
    """
    recipe = job.prepared()
    with simulation(recipe, device=torch.device(job.device)) as running:
        progress, loaded = Progress(job.recipe, job.seed, recipe.rounds), time.monotonic()

        def note() -> None:
            progress.seconds, progress.scores = time.monotonic() - loaded, _scores(running)
            progress.write(Path(job.progress))

        def after_task() -> None:
            if time.monotonic() > job.deadline:
                raise _TimeIsUpError  # `until` is asked once a pass, and the last pass scores a hundred models
            done, _ = status(running.run.phase, recipe.rounds)
            if done != progress.rounds:
                progress.rounds = done
                if done % EVERY == 0:
                    note()

        note()
        with suppress(_TimeIsUpError):
            running.go(on_task=after_task)
        if running.runs.failed:
            raise RunFailedError(f"run failed: {running.runs.failed[0]}")
        progress.rounds, _ = status(running.run.phase, recipe.rounds)
        progress.ended = running.runs.finished
        note()
    return progress


def _scores(running: Simulation) -> dict[int, dict[str, float]]:
    by_round = running.ledger.scores(running.recipe.name)
    return {
        number: {name: spread.mean for name, spread in spreads(sites).items()} for number, sites in by_round.items()
    }


def main(file: Path) -> None:
    """Entry point of the process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    keep_memory()
    torch.set_num_threads(1)  # several run side by side
    run(Job(**json.loads(file.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
