"""What needs no Ray: what is checked before it is imported, and what a node of its cluster does with a job.

A job runs on a node as the same process as without one, in the caller's folder if the node has that, too.
"""

from __future__ import annotations

import os
import platform
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe, parse_json
from protofed.common.config.tables import StrictModel
from protofed.common.errors import ConfigError
from protofed.common.storage.files import find_network_type
from protofed.common.version import VERSION, install_hint
from protofed.deploy.experiments.code_digest import digest_code
from protofed.deploy.experiments.experiment import LOG, RESULT, ExperimentJob
from protofed.deploy.experiments.jobs import Worker
from protofed.deploy.progress import end

DATA = "PROTOFED_DATA"
LOCAL = "local"  # address of a cluster that is started for the call
_LOOK_S = 0.2
_LOG_BYTES = 8 << 20  # the end of a log that is longer


def set_up(address: str, device: str, gpus_per_job: float | None = None) -> None:
    """Set the variables that Ray reads when it is imported.

    Raises:
        ConfigError: it is not installed, or as of `resources`.
    """
    if find_spec("ray") is None:
        raise ConfigError(f"--ray: Ray is not installed: {install_hint('client', 'ray')}")
    resources(device, gpus_per_job)
    if address == LOCAL:  # its ports are open to the network: it asks for a token that nobody knows
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers that it was used


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


class NodeOrder(StrictModel):
    """What a node is asked to do with a job, as JSON.

    Attributes:
        protofed: the caller's version.
        code: digest of the code with which the caller would compute the job.
        recipe: as the file says it; it may have keys that only the caller's version knows.
        folder: the job's at the caller, with an empty file of the name `mark` in it.
        data: the caller's PROTOFED_DATA, for nodes that have none of their own.
    """

    protofed: str
    code: Digest
    recipe: str
    folder: Path
    mark: str
    device: str
    data: str | None = None


class NodeResult(StrictModel):
    """What became of the job, as JSON.

    Attributes:
        node: its host name.
        failed: why, if it did.
        run_failed: as `ExperimentJob.failure`, if what the job computes failed; None where the caller sees it, too.
        result: the text of result.json; None if it failed, or stands where the caller sees it.
        log: the text of job.log; empty where the caller sees it.
    """

    node: str
    failed: str | None = None
    run_failed: str | None = None
    result: str | None = None
    log: str = ""


def carry_out(order: str, report: Callable[[int, str], None]) -> str:
    """Do what an `NodeOrder` says and give an `NodeResult`.

    Args:
        report: called with the rounds that are done and what goes on, when either changes.
    """
    node_order, node = parse_json(order, NodeOrder, "an order"), platform.node()
    if why := _refusal(node_order):
        return NodeResult(node=node, failed=why).model_dump_json()
    with _folder(node_order) as folder:
        in_place = folder == node_order.folder
        failed = _run(folder, node_order, report, in_place)
        if in_place:
            return NodeResult(node=node, failed=failed).model_dump_json()
        return NodeResult(
            node=node,
            failed=failed,
            run_failed=ExperimentJob.claimed(folder).failure(),
            result=None if failed else (folder / RESULT).read_text(encoding="utf-8"),
            log=_read_end(folder / LOG),
        ).model_dump_json()


def _refusal(order: NodeOrder) -> str | None:
    if order.protofed != VERSION:
        return f"protofed {VERSION} is there, not {order.protofed}"
    if digest_code(parse_json(order.recipe, Recipe, "the recipe")).whole != order.code:
        return "other code is there: another state of protofed or of a plug-in, or libraries of other versions"
    return None


@contextmanager
def _folder(order: NodeOrder) -> Iterator[Path]:
    """The caller's, on a disk of this machine; else one of the node's own, which is removed."""
    here = (order.folder / order.mark).exists() and os.access(order.folder, os.W_OK)
    if here and find_network_type(order.folder) is None:
        yield order.folder
        return
    recipe = parse_json(order.recipe, Recipe, "the recipe")
    with tempfile.TemporaryDirectory(prefix="protofed-") as scratch:
        (folder := Path(scratch) / "job").mkdir()
        ExperimentJob(recipe, folder).claim()
        yield folder


def _run(folder: Path, order: NodeOrder, report: Callable[[int, str], None], in_place: bool) -> str | None:
    data = {DATA: order.data} if order.data and DATA not in os.environ else {}
    worker, reported = Worker.start(folder, order.device, 1, **data), (0, "")
    try:
        while worker.process.poll() is None:
            worker.listen()
            if reported != (reported := (worker.rounds_done, worker.doing)):
                report(*reported)
            time.sleep(_LOOK_S)
    finally:  # also when it is cancelled
        end([worker.process])
        failure = worker.failure(resumable=in_place)
    return failure


def _read_end(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        return file.read().decode(errors="replace")
