"""The Ray cluster of `compare --ray` and `simulate --ray`: joined, or begun for the call."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

from protofed.common.errors import ConfigError, UnavailableError
from protofed.common.version import VERSION
from protofed.deploy.experiments.ray_node import LOCAL
from protofed.deploy.experiments.ray_tasks import Tasks, line

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


@contextmanager
def cluster(address: str, device: str, gpus_per_job: float | None, cores: int) -> Iterator[Tasks]:
    """The place of jobs in the cluster of `joined`; no task of ours is left in it."""
    with joined(address, device, gpus_per_job, cores) as there:
        yield Tasks(there.room, there.device, there.gpus)


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
    with ExitStack() as held:
        nowhere = held.enter_context(open(os.devnull, "w", encoding="utf-8"))
        held.enter_context(redirect_stdout(nowhere))  # Ray prints there what befalls its nodes
        held.callback(ray.shutdown)
        if address == LOCAL:
            _begin(cores, _STORE_BYTES + store_bytes)
        else:
            _join(address)
        listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        nodes = usable(listed, gpus)
        _check_versions(nodes)
        yield Cluster(sum(node.room for node in nodes), where, gpus)


def resources(device: str, gpus_per_job: float | None) -> tuple[str, float]:
    """What a job is run on, and its share of GPUs: Ray chooses which one, and shows a job no other.

    Raises:
        ConfigError: they do not go together.
    """
    if device not in ("cpu", "cuda", "auto"):
        raise ConfigError(f"--device {device} with --ray: expected cpu or cuda; Ray gives each job its own GPU")
    if gpus_per_job is not None and (device == "cpu") == bool(gpus_per_job):
        raise ConfigError(f"--gpus-per-job {gpus_per_job:g} does not go with --device {device}")
    gpus = gpus_per_job if gpus_per_job is not None else float(device == "cuda")
    return "cuda" if gpus else "cpu", gpus


def usable(nodes: list[dict[str, Any]], gpus: float) -> list[Node]:
    """The nodes, as Ray lists them, that can run a job.

    Raises:
        ConfigError: none can.
    """
    alive = [node for node in nodes if node["Alive"]]
    found = [Node(node["NodeID"], _name(node), _room(node["Resources"], gpus)) for node in alive]
    if not any(node.room for node in found):
        names = ", ".join(node.name for node in found) or "none"
        wanted = f"a core and {gpus:g} GPU" if gpus else "a core"
        raise ConfigError(f"no node of the cluster has {wanted} for a job; its nodes: {names}")
    return [node for node in found if node.room]


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _room(has: Mapping[str, float], gpus: float) -> int:
    return int(min(has.get("CPU", 0), has.get("GPU", 0) / gpus)) if gpus else int(has.get("CPU", 0))


def _begin(cores: int, store_bytes: int) -> None:
    """A cluster of this machine."""
    folder = tempfile.mkdtemp(prefix="ray-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # runs after what Ray registers below
    _quietly(LOCAL, num_cpus=cores, include_dashboard=False, object_store_memory=store_bytes, _temp_dir=folder)


def _join(address: str) -> None:
    _quietly(address)


def _quietly(address: str, **options: Any) -> None:
    """With nothing of Ray's on the terminal.

    Raises:
        UnavailableError: there is no cluster, or it is another version's.
    """
    for tries_left in reversed(range(_STARTS if address == LOCAL else 1)):
        try:
            with _standard_error_closed():
                ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL, **options)
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
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _check_versions(nodes: list[Node]) -> None:
    """Every node has this version of protofed.

    Raises:
        ConfigError: naming the first one that has not.
    """
    look = ray.remote(metadata.version)
    asked = [look.options(num_cpus=0, scheduling_strategy=On(node.id, soft=False)).remote("protofed") for node in nodes]
    until = time.monotonic() + _ANSWER_S
    for node, answer in zip(nodes, asked, strict=True):
        try:
            there = ray.get(answer, timeout=max(1.0, until - time.monotonic()))
        except RayTaskError:
            there = None
        except RayError as error:
            raise UnavailableError(
                f"node {node.name} of the cluster does not answer ({type(error).__name__})"
            ) from error
        if there != VERSION:
            has = f"has protofed {there}" if there else "has no protofed"
            raise ConfigError(f"node {node.name} of the cluster {has}; here it is {VERSION}: install the same on all")
