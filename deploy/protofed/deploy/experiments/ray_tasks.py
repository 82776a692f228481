"""A comparison's jobs as tasks of Ray. Only text and numbers go to the nodes and come back."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

from protofed.common.config.recipe import parse_json
from protofed.common.storage import files
from protofed.common.version import VERSION
from protofed.deploy.experiments.code_digest import code_of
from protofed.deploy.experiments.experiment import RESULT, ExperimentJob, Result
from protofed.deploy.experiments.jobs import JobProgress
from protofed.deploy.experiments.ray_node import DATA, NodeOrder, NodeResult, carry_out
from protofed.deploy.progress import TERMINATE_S

_TRIES = 3  # of a job whose node or worker dies


class ProgressBoard:
    """An actor beside the caller on which jobs write how they get on."""

    def __init__(self) -> None:
        self._by_job: dict[str, tuple[int, str]] = {}

    def report(self, job: str, done: int, doing: str) -> None:
        """So many rounds are done, and this goes on."""
        self._by_job[job] = (done, doing)

    def read(self) -> str:
        """JSON: [done, doing] by job, of those that have said something."""
        return json.dumps(self._by_job)


def _carry_out(job: str, order: str, board: str) -> str:
    board_actor = ray.get_actor(board)
    return carry_out(order, lambda done, doing: board_actor.report.remote(job, done, doing))


@dataclass
class Tasks:
    """The place of jobs: whichever node has room.

    Attributes:
        room: jobs that all nodes together can run at a time.
    """

    room: int
    device: str
    gpus: float
    _name: str = field(default_factory=lambda: f"protofed-{secrets.token_hex(8)}")
    _tasks: dict[ExperimentJob, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """With a board at the caller's own node, if it is one."""
        here = On(ray.get_runtime_context().get_node_id(), soft=True)
        self._board: Any = (
            ray.remote(ProgressBoard).options(name=self._name, num_cpus=0, scheduling_strategy=here).remote()
        )

    def start(self, job: ExperimentJob) -> None:
        """As a task; Ray begins it again elsewhere when its node dies."""
        files.sweep([job.folder])
        self._mark(job).touch()
        order = NodeOrder(
            protofed=VERSION,
            code=code_of(job.recipe).whole,
            recipe=job.recipe.model_dump_json(),
            folder=job.folder.absolute(),
            mark=self._mark(job).name,
            device=self.device,
            data=os.path.abspath(data) if (data := os.environ.get(DATA)) else None,
        )
        task = ray.remote(_carry_out).options(
            name=job.name, num_cpus=1, num_gpus=self.gpus, max_retries=_TRIES - 1, scheduling_strategy="SPREAD"
        )
        self._tasks[job] = task.remote(job.name, order.model_dump_json(), self._name)

    def look(self) -> list[JobProgress]:
        """What the board says, and what has ended."""
        progress, ended = self._progress(), set()
        if self._tasks:
            ended = set(ray.wait(list(self._tasks.values()), num_returns=len(self._tasks), timeout=0)[0])
        news = []
        for job, task in list(self._tasks.items()):
            done, doing = progress.get(job.name, (0, "waiting for the cluster"))
            if task not in ended:
                news.append(JobProgress(job, done, doing))
                continue
            del self._tasks[job]
            failure = self._settle(job, task)
            news.append(JobProgress(job, done if failure else job.recipe.rounds, doing, ended=True, failure=failure))
        return news

    def end(self) -> None:
        """Cancel the tasks, and wait until their processes have ended."""
        with contextlib.suppress(RayError):
            for task in self._tasks.values():
                ray.cancel(task, force=False)
            self._wait(TERMINATE_S + 2)
            for task in self._tasks.values():
                ray.cancel(task, force=True)
            self._wait(1)
        for job in self._tasks:
            self._mark(job).unlink(missing_ok=True)

    def _wait(self, seconds: float) -> None:
        if self._tasks:
            ray.wait(list(self._tasks.values()), num_returns=len(self._tasks), timeout=seconds)

    def _progress(self) -> Mapping[str, tuple[int, str]]:
        try:
            progress: dict[str, tuple[int, str]] = json.loads(ray.get(self._board.read.remote(), timeout=5))
        except RayError:  # the view waits; the tasks tell whether something is wrong
            return {}
        return progress

    def _settle(self, job: ExperimentJob, task: Any) -> str | None:
        """Keep what came back; why the job failed, if it did."""
        self._mark(job).unlink(missing_ok=True)
        try:
            answer = parse_json(ray.get(task), NodeResult, "an answer")
        except RayTaskError as error:
            return _lost(job, f"internal error on a node: {line(error.cause)}")
        except RayError as error:
            return _lost(job, f"its node died, or Ray ended it, {_TRIES} times ({type(error).__name__})")
        if answer.log:
            with job.log.open("a", encoding="utf-8") as log:
                log.write(answer.log)
        if answer.run_failed is not None:
            job.write_failure(answer.run_failed)
        if answer.result is not None:
            parse_json(answer.result, Result, f"what came from {answer.node}")
            files.write(job.folder / RESULT, answer.result.encode())
        return f"{answer.failed} (on {answer.node})" if answer.failed else None

    def _mark(self, job: ExperimentJob) -> Path:
        return job.folder / f"{files.TEMPORARY}{self._name}"


def _lost(job: ExperimentJob, why: str) -> str:
    """No log came back: say it there."""
    with job.log.open("a", encoding="utf-8") as log:
        log.write(json.dumps({"event": why, "level": "error"}) + "\n")
    return why


def line(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
