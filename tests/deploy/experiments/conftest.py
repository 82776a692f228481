"""Jobs that nobody computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.support.results import result_of

from protofed.common.config.recipe import Recipe
from protofed.deploy.experiments import compare
from protofed.deploy.experiments.code_digest import digest_code
from protofed.deploy.experiments.experiment import ExperimentJob
from protofed.deploy.experiments.jobs import is_done


class StandIn:
    """Takes the place of `run_jobs`, and lasts no time.

    Attributes:
        ran: names of the jobs that were run, in order.
        score: the accuracy of a recipe's global model; an error of it is the run's failure.
        stop_after: jobs, after which it is interrupted.
        broken: names of jobs whose process dies.
    """

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.score: Callable[[Recipe], float] = lambda _: 0.5
        self.stop_after = 10**6
        self.broken: set[str] = set()

    def __call__(self, jobs: Sequence[ExperimentJob], *_: Any, **__: Any) -> dict[ExperimentJob, str]:
        failures = {}
        for job in jobs:
            if is_done(job):
                continue
            if len(self.ran) == self.stop_after:
                raise KeyboardInterrupt
            self.ran.append(job.name)
            job.begin(code := digest_code(job.recipe))
            job.state.mkdir(exist_ok=True)
            if job.name in self.broken:
                failures[job] = "killed by SIGKILL"
                continue
            try:
                result = result_of(job.recipe, job.recipe.seed, self.score(job.recipe))
            except ArithmeticError as diverged:
                job.write_failure(str(diverged))
                failures[job] = f"run failed: {diverged}"
                continue
            job.write_result(result.model_copy(update={"code": code}))
        return failures


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """What runs the jobs of `compare`, without pictures, which take seconds."""
    taken = StandIn()
    monkeypatch.setattr(compare, "run_jobs", taken)
    monkeypatch.setattr(compare, "draw", lambda *_: [])
    return taken
