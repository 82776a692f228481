"""The Ray cluster of `compare --ray` and `simulate --ray`: joined, or started for the call; jobs as its tasks."""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

from protofed.common.config.recipe import parse_json
from protofed.common.errors import ConfigError, UnavailableError
from protofed.common.storage import files
from protofed.common.version import VERSION
from protofed.deploy.experiments.code_digest import digest_code
from protofed.deploy.experiments.experiment import RESULT, ExperimentJob, Result
from protofed.deploy.experiments.jobs import JobProgress
from protofed.deploy.experiments.ray_node import DATA, LOCAL, NodeOrder, NodeResult, carry_out, resources
from protofed.deploy.progress import TERMINATE_S

_TRIES = 3  # of a job whose node or worker dies
_ANSWER_S = 120.0  # within which every node says its version
_STARTS = 2  # of a cluster of one's own: Ray gives up after 15 s, too soon on a busy machine
_STORE_BYTES = 100 << 20  # for objects; a result has kilobytes


@dataclass(frozen=True)
class Node:
    """A machine of the cluster that can run jobs, and how many at a time."""

    id: str
    name: str
    room: int


@dataclass(frozen=True)
class Cluster:
    """A cluster that was joined.

    Attributes:
        room: jobs that all nodes together can run at a time.
        device, gpus: what a job is run on, and its share of GPUs.
    """

    room: int
    device: str
    gpus: float

    @property
    def options(self) -> dict[str, Any]:
        """Of Ray, for a task or an actor that has a job's share of a node."""
        return {"num_cpus": 1, "num_gpus": self.gpus, "scheduling_strategy": "SPREAD"}


@contextmanager
def joined(
    address: str, device: str, gpus_per_job: float | None, cores: int, store_bytes: int = 0
) -> Iterator[Cluster]:
    """A Ray cluster for as long as this lasts.

    Args:
        address: of the cluster; `auto`: the one of RAY_ADDRESS or of this machine; `local`: one that is started here,
            of `cores`, and ends with this.
        gpus_per_job: None: one where the device is a GPU.
        store_bytes: room for objects that one of `local` needs beside results.

    Raises:
        ConfigError: it has no node for such a job, or one of its nodes has another version of protofed.
        UnavailableError: it cannot be joined.
    """
    where, gpus = resources(device, gpus_per_job)
    with ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stack.enter_context(redirect_stdout(nowhere))  # Ray prints there what befalls its nodes
        stack.callback(ray.shutdown)
        _connect(address, cores, _STORE_BYTES + store_bytes)
        listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        nodes = usable(listed, gpus)
        _check_versions(nodes)
        yield Cluster(sum(node.room for node in nodes), where, gpus)


def usable(nodes: list[dict[str, Any]], gpus: float) -> list[Node]:
    """The nodes, as Ray lists them, that can run a job.

    Raises:
        ConfigError: none can.
    """
    alive = [node for node in nodes if node["Alive"]]
    candidates = [Node(node["NodeID"], _name(node), _room(node["Resources"], gpus)) for node in alive]
    if not any(node.room for node in candidates):
        names = ", ".join(node.name for node in candidates) or "none"
        need = f"a core and {gpus:g} GPU" if gpus else "a core"
        raise ConfigError(f"no node of the cluster has {need} for a job; its nodes: {names}")
    return [node for node in candidates if node.room]


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _room(available: Mapping[str, float], gpus: float) -> int:
    return int(min(available.get("CPU", 0), available.get("GPU", 0) / gpus)) if gpus else int(available.get("CPU", 0))


def _connect(address: str, cores: int, store_bytes: int) -> None:
    """Join a cluster, or begin one of this machine, with nothing of Ray's on the terminal.

    Raises:
        UnavailableError: there is no cluster, or it is another version's.
    """
    own: dict[str, Any] = {}
    if address == LOCAL:
        folder = tempfile.mkdtemp(prefix="ray-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # runs after what Ray registers below
        own = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": store_bytes, "_temp_dir": folder}
    for tries_left in reversed(range(_STARTS if own else 1)):
        try:
            with _standard_error_closed():
                ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL, **own)
            return
        except Exception as error:  # Ray raises many kinds, and plain ones, too
            if not tries_left:
                raise UnavailableError(
                    f"no Ray cluster at '{address}': {line(error)}; {_hint(address, error)}"
                ) from error
            ray.shutdown()


def _hint(address: str, error: BaseException) -> str:
    if error.__cause__ is not None and "AuthToken" in str(error.__cause__):
        return "it asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file that has its token"
    return "this machine may be too busy" if address == LOCAL else "`ray status` shows one that runs"


@contextmanager
def _standard_error_closed() -> Iterator[None]:
    """Ray's native code writes there, whatever its level, until it knows the folder of its logs."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def _check_versions(nodes: list[Node]) -> None:
    """Every node has this version of protofed.

    Raises:
        ConfigError: naming the first one that has not.
    """
    look = ray.remote(metadata.version)
    answers = [
        look.options(num_cpus=0, scheduling_strategy=On(node.id, soft=False)).remote("protofed") for node in nodes
    ]
    until = time.monotonic() + _ANSWER_S
    for node, answer in zip(nodes, answers, strict=True):
        try:
            version = ray.get(answer, timeout=max(1.0, until - time.monotonic()))
        except RayTaskError:
            version = None
        except RayError as error:
            raise UnavailableError(
                f"node {node.name} of the cluster does not answer ({type(error).__name__})"
            ) from error
        if version != VERSION:
            finding = f"has protofed {version}" if version else "has no protofed"
            raise ConfigError(
                f"node {node.name} of the cluster {finding}; here it is {VERSION}: install the same on all"
            )


def line(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


class ProgressBoard:
    """An actor beside the caller on which jobs write how they get on."""

    def __init__(self) -> None:
        self._by_job: dict[str, tuple[int, str]] = {}

    def report(self, job: str, rounds_done: int, doing: str) -> None:
        """So many rounds are done, and this goes on."""
        self._by_job[job] = (rounds_done, doing)

    def read(self) -> str:
        """JSON: [done, doing] by job, of those that have said something."""
        return json.dumps(self._by_job)


def _carry_out(job: str, order: str, board: str) -> str:
    board_actor = ray.get_actor(board)
    return carry_out(order, lambda rounds_done, doing: board_actor.report.remote(job, rounds_done, doing))


@dataclass
class Tasks:
    """The place of jobs: whichever node has room. Only text and numbers go to the nodes and come back."""

    cluster: Cluster
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
            code=digest_code(job.recipe).whole,
            recipe=job.recipe.model_dump_json(),
            folder=job.folder.absolute(),
            mark=self._mark(job).name,
            device=self.cluster.device,
            data=os.path.abspath(data) if (data := os.environ.get(DATA)) else None,
        )
        task = ray.remote(_carry_out).options(name=job.name, max_retries=_TRIES - 1, **self.cluster.options)
        self._tasks[job] = task.remote(job.name, order.model_dump_json(), self._name)

    def look(self) -> list[JobProgress]:
        """What the board says, and what has ended."""
        progress, ended = self._progress(), set()
        if self._tasks:
            ended = set(ray.wait(list(self._tasks.values()), num_returns=len(self._tasks), timeout=0)[0])
        news = []
        for job, task in list(self._tasks.items()):
            rounds_done, doing = progress.get(job.name, (0, "waiting for the cluster"))
            if task not in ended:
                news.append(JobProgress(job, rounds_done, doing))
                continue
            del self._tasks[job]
            failure = self._settle(job, task)
            news.append(
                JobProgress(job, rounds_done if failure else job.recipe.rounds, doing, ended=True, failure=failure)
            )
        return news

    def end(self) -> None:
        """Cancel the tasks, and wait until their processes have ended."""
        with suppress(RayError):
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
