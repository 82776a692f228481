"""Rounds of echo clients, which train nothing, against a real server process over loopback with mTLS.

`python -m tests.bench.echo --megabytes 45 --sites 8 --rounds 5` prints one measurement as JSON; `--plaintext` without
TLS, `--without-sync` with syncs that do nothing. Each client is a link with threads of its own; all of them share this
process. `--on-disk`: the clients keep audit logs and downloads on the disk, as daemons do; without it their disk, which
is the server's here, would be measured with it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import structlog
from tests.bench.server_process import Server, bench_recipe, memory, processor, server
from tests.support.audit_logs import audit

from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import PolicyRules
from protofed.client.state.downloads import DiskDownloads
from protofed.client.transport.audit import FILE, ClientAudit
from protofed.client.transport.grpc_link import GrpcLink
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload, Update
from protofed.common.pki.identity import LiveIdentity, Party
from protofed.common.process import keep_memory
from protofed.common.protocol.messages import Assignment, Finished, Receipt, Role, Task, TaskKind, Verdict, Wait
from protofed.common.storage.journal import Journal

CLASSES, LAYERS, MARKS = 10, 8, 64
POLICY = Policy(PolicyRules(methods=frozenset({"fedavg"}), parts=frozenset({Part.BODY, Part.HEAD})))


@dataclass(frozen=True)
class Case:
    """So many sites that echo so large a model for so many rounds.

    Attributes:
        durable: the server's syncs are carried out.
        tls: mutual TLS; else plain text.
        on_disk: the clients' audit logs and downloads are on disk; else in memory.
    """

    megabytes: float
    sites: int
    rounds: int
    durable: bool = True
    tls: bool = True
    on_disk: bool = False

    @property
    def names(self) -> list[str]:
        """Of the sites."""
        return [f"site-{index}" for index in range(self.sites)]

    @property
    def recipe(self) -> Recipe:
        """FedAvg of every site, each round; scored once, at the end."""
        rules = {"min_sites": self.sites, "quorum": 1.0, "score_every": 0, "stall_timeout_s": 600.0}
        return bench_recipe("echo", self.rounds, federation=rules)

    def model(self) -> Payload:
        """Random weights of that size, and a place where each site leaves its mark."""
        generator, share = np.random.default_rng(0), int(self.megabytes * 1e6 / 4 / LAYERS)
        body = {f"layer{number}.weight": generator.random(share, np.float32) for number in range(LAYERS)}
        body["marks"] = np.zeros(MARKS, np.float32)
        return {Part.BODY: body, Part.HEAD: {"weight": np.zeros((CLASSES, 8), np.float32)}}


@dataclass(frozen=True)
class Moment:
    """What was counted when a round began.

    Attributes:
        clock, server, clients: seconds on the clock, and of processors.
        syncs, client_syncs: since the start.
        rss, peak: the server's resident megabytes, now and at most.
    """

    clock: float
    server: float
    clients: float
    syncs: int
    client_syncs: int
    rss: float
    peak: float


@dataclass
class Measured:
    """Moments by round, at which its first task was given out; one past the last round: its end."""

    case: Case
    moments: dict[int, Moment] = field(default_factory=dict)
    lags: dict[str, float] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        """Of each round but the first, in which the server takes its memory."""
        times = [self.moments[number] for number in sorted(self.moments)][1:]
        first, last, rounds = times[0], times[-1], len(times) - 1
        return {
            "seconds": [after.clock - before.clock for before, after in pairwise(times)],
            "server_cpu_s": (last.server - first.server) / rounds,
            "clients_cpu_s": (last.clients - first.clients) / rounds,
            "syncs": (last.syncs - first.syncs) / rounds,
            "client_syncs": (last.client_syncs - first.client_syncs) / rounds,
            "peak_mb": last.peak,
            "lag_ms": self.lags,
            "rss_mb": {number: one.rss for number, one in self.moments.items() if number % 25 == 1},
            "growth_kb_a_round": self.growth(),
        }

    def growth(self) -> float:
        """Kilobytes of resident memory a round: the least-squares slope over the later three quarters."""
        numbers = sorted(self.moments)[len(self.moments) // 4 :]
        return float(np.polyfit(numbers, [1000 * self.moments[number].rss for number in numbers], 1)[0])


def measure(case: Case, folder: Path) -> Measured:
    """One server process from its start to the end of its run."""
    found, lock = Measured(case), threading.Lock()
    served = server(case.recipe, folder, case.names, durable=case.durable, tls=case.tls)
    with _own_syncs() as own_syncs, served as running:

        def note(number: int) -> None:
            with lock:
                if number not in found.moments:
                    spent = processor(running.process), time.process_time()
                    counted = running.syncs(), own_syncs()
                    found.moments[number] = Moment(time.perf_counter(), *spent, *counted, *memory(running.process))

        with ThreadPoolExecutor(case.sites) as pool:
            list(pool.map(lambda index: _Echo(case, running, index, note).run(), range(case.sites)))
        note(case.rounds + 1)
    found.lags = running.lags()
    return found


@contextmanager
def _own_syncs() -> Iterator[Callable[[], int]]:
    """How many syncs this process has asked for."""
    real, lock, calls = os.fsync, threading.Lock(), 0

    def counted(file: int) -> None:
        nonlocal calls
        with lock:
            calls += 1
        real(file)

    with mock.patch("os.fsync", counted):
        yield lambda: calls


@dataclass
class _Echo:
    """A site that sends back what it got, with its mark."""

    case: Case
    server: Server
    index: int
    note: Callable[[int], None]

    def run(self) -> None:
        link = self._link()
        try:
            assignment = link.enroll()
            assert isinstance(assignment, Assignment)
            while not isinstance(answer := link.next_task(assignment.run, 20.0), Finished):
                if isinstance(answer, Wait):
                    time.sleep(answer.retry_after_s)
                else:
                    self._do(link, answer)
            assert answer.reason == "completed", answer.reason
        finally:
            link.close()

    def _link(self) -> GrpcLink:
        name, identities = f"site-{self.index}", self.server.identities
        roles = frozenset(Role) if self.index == 0 else frozenset({Role.TRAINER})
        identity = None if identities is None else LiveIdentity(identities / name, Party.SITE)
        log, downloads = audit(), None
        if self.case.on_disk:
            state = self.server.folder / "sites" / name
            (state / "downloads").mkdir(parents=True)
            log, downloads = ClientAudit(Journal(state / FILE)), DiskDownloads(state / "downloads")
        return GrpcLink(
            self.server.address,
            name,
            f"echo-{self.index}",
            roles,
            identity=identity,
            audit=log,
            downloads=downloads,
            give_up_after_s=60.0,
        )

    def _do(self, link: GrpcLink, task: Task) -> None:
        match task.kind:
            case TaskKind.INITIALISE:
                self._push(link, task, self.case.model())
            case TaskKind.FIT:
                self.note(task.round)
                self._push(link, task, self._marked(codec.view(link.fetch(task))))
            case TaskKind.SCORE:
                self.note(self.case.rounds + 1)
                link.report(task, POLICY.release_scores({}))

    def _marked(self, model: Payload) -> Payload:
        marks = np.array(model[Part.BODY]["marks"])
        marks[self.index] += 1.0  # equally far from the model for every site, and no two sites send the same bytes
        return {**model, Part.BODY: {**model[Part.BODY], "marks": marks}}

    def _push(self, link: GrpcLink, task: Task, payload: Payload) -> None:
        receipt: Receipt = link.push(task, POLICY.release(Update(f"site-{self.index}", payload)))
        assert receipt.verdict is Verdict.ACCEPTED, receipt


def main() -> None:
    """Print what was measured as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.echo", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=45.0)
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    for name in ("plaintext", "without-sync", "on-disk"):
        parser.add_argument(f"--{name}", action="store_true")
    given = parser.parse_args()
    keep_memory()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is printed is the result
    how = not given.without_sync, not given.plaintext, given.on_disk
    case = Case(given.megabytes, given.sites, given.rounds, *how)
    with tempfile.TemporaryDirectory(prefix="protofed-echo-", dir=os.environ.get("BENCH_STATE")) as folder:
        print(json.dumps(measure(case, Path(folder)).told()))  # noqa: T201


if __name__ == "__main__":
    main()
