"""Robust rules beside the mean: seconds and memory of an aggregation of 45 MB × 8, of mapped files as a server's."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
from tests.bench.report import Row, seconds
from tests.support.round_contexts import round_context

from protofed.common import codec
from protofed.common.config.recipe import Robust
from protofed.common.payload import Part, Payload, distance_norm
from protofed.common.process import keep_memory
from protofed.common.protocol.messages import TaskKind, Verdict
from protofed.server.methods.fedavg import FedAvgServer
from protofed.server.rounds.aggregation.publisher import Publisher
from protofed.server.rounds.aggregation.robust_rule import RobustRule
from protofed.server.storage.blobs import FolderBlobs
from protofed.server.storage.rows import TaskRow, UpdateRow

PARAMETERS, SITES, MORE, REPETITIONS = 11_250_000, 8, 16, 5
RULES: tuple[Robust, ...] = get_args(Robust)


def rows() -> Iterator[Row]:
    """By rule: seconds beside the mean, in turns; memory of 16 updates beside 8."""
    keep_memory()  # as every daemon does
    with tempfile.TemporaryDirectory() as folder:
        blobs = FolderBlobs(Path(folder))
        state, updates = model(0), [row_of(blobs, number) for number in range(SITES)]
        times: dict[Robust, list[float]] = {rule: [] for rule in RULES}
        for _ in range(REPETITIONS):
            for rule in RULES:
                times[rule].append(seconds(partial(aggregate, blobs, state, updates, rule)))
    mean = times.pop("none")
    for rule, measured in times.items():
        ratio = statistics.median(one / other for one, other in zip(measured, mean, strict=True))
        figure, beside = statistics.median(measured), statistics.median(mean)
        yield Row(f"robust rule {rule}, 45 MB × {SITES}", figure, "s", beside, "the mean", ratio, at_most=2.0)
    for rule in RULES[1:]:
        few, many = peak_mb(rule, SITES), peak_mb(rule, MORE)
        what = f"robust rule {rule}, 45 MB × {MORE}: memory, without mapped files"
        yield Row(what, many, "MB", few, f"× {SITES}", many / few, at_most=1.1)


def model(number: int) -> Payload:
    """45 MB of body, as updates have it: far from each other by a tenth of their length."""
    rng = np.random.default_rng(number)
    common = np.random.default_rng(0).standard_normal(PARAMETERS, dtype=np.float32)
    own = rng.standard_normal(PARAMETERS, dtype=np.float32)
    return {Part.BODY: {"w": common + np.float32(0.1) * own}, Part.HEAD: {"weight": np.ones((10, 4), np.float32)}}


def row_of(blobs: FolderBlobs, number: int) -> UpdateRow:
    """An update on disk, as the ledger has it."""
    data = codec.encode(model(number + 1))
    site = f"site-{number:02d}"
    task = TaskRow(f"task-{number}", "bench", 1, 1, site, TaskKind.FIT, None, 0)
    norm = distance_norm(model(number + 1), model(0))
    return UpdateRow(task, Verdict.ACCEPTED, "", blobs.put(data), len(data), {}, None, norm=norm)


def aggregate(blobs: FolderBlobs, state: Payload, updates: list[UpdateRow], rule: Robust) -> None:
    """As a round's, Krum's choice included."""
    method = FedAvgServer()
    robust = None if rule == "none" else RobustRule(rule, 1, method)
    publisher = Publisher(method, blobs, 2, robust=robust)
    opened = publisher.opened(updates) if publisher.chooses(state) else {}
    rejected = publisher.rejected(state, updates, opened)
    used = [row for row in updates if row.task.site not in rejected]
    publisher.aggregate(state, used, round_context(), opened=opened)


def peak_mb(rule: Robust, sites: int) -> float:
    """Of a process of its own: the most memory that is no file's, MB of 10^6 bytes."""
    command = [sys.executable, "-m", "tests.bench.robust_rules", rule, str(sites)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Print the growth of the process's own memory at its highest, as `peak_mb` reads it."""
    import threading

    rule, sites = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        blobs = FolderBlobs(Path(folder))
        updates = [row_of(blobs, number) for number in range(sites)]
        state, found, over = model(0), list[int](), threading.Event()

        def watch() -> None:
            while not over.wait(0.002):
                found.append(anonymous())

        watcher = threading.Thread(target=watch)
        watcher.start()
        aggregate(blobs, state, updates, next(one for one in RULES if one == rule))
        over.set()
        watcher.join()
    sys.stdout.write(f"{max(found) / 1e6}\n")


def anonymous() -> int:
    """Bytes of memory now that are no mapped file's."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main()
