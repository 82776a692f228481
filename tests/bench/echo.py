"""Rounds of echo clients, which train nothing, against a real server process over loopback: the server's own cost.

`python -m tests.bench.echo` measures what commits that survive a power cut cost: rounds of 8 sites × 45 MB, and the
same with an fsync that does nothing, in turns. `--memory` is 500 rounds of 4 × 1 MB and how the server's memory grows;
`--small` 32 × 1 MB. Each client is a link with threads of its own; all of them share this process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from tests.bench.server_process import memory, processor, server, skipped_syncs
from tests.support.audit_logs import audit

from protofed.client.privacy.policy import Policy
from protofed.client.privacy.rules import PolicyRules
from protofed.client.transport.grpc_link import GrpcLink
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.malloc import keep_memory
from protofed.common.payload import Part, Payload, Update
from protofed.common.protocol.messages import Assignment, Finished, Receipt, Role, Task, TaskKind, Verdict, Wait

CLASSES, LAYERS, MARKS = 10, 8, 64
POLICY = Policy(PolicyRules(methods=frozenset({"fedavg"}), parts=frozenset({Part.BODY, Part.HEAD})))


@dataclass(frozen=True)
class Case:
    """So many sites that echo so large a model for so many rounds."""

    megabytes: float
    sites: int
    rounds: int

    @property
    def recipe(self) -> Recipe:
        """FedAvg of every site, each round; scored once, at the end."""
        return Recipe.model_validate(
            {
                "name": "echo",
                "rounds": self.rounds,
                "classes": CLASSES,
                "input": {"shape": [1, 8, 8]},
                "method": {"name": "fedavg"},
                "model": {"name": "mlp"},
                "federation": {"min_sites": self.sites, "quorum": 1.0, "score_every": 0, "stall_timeout_s": 600.0},
            }
        )

    def model(self) -> Payload:
        """Random weights of that size, and a place where each site leaves its mark."""
        generator, share = np.random.default_rng(0), int(self.megabytes * 1e6 / 4 / LAYERS)
        body = {f"layer{number}.weight": generator.random(share, np.float32) for number in range(LAYERS)}
        body["marks"] = np.zeros(MARKS, np.float32)
        return {Part.BODY: body, Part.HEAD: {"weight": np.zeros((CLASSES, 8), np.float32)}}


@dataclass
class Seen:
    """What was measured.

    Attributes:
        began: seconds, by round, at which its first task was given out; one past the last round: its end.
        rss: the server's resident megabytes at those times.
        peak: its highest resident megabytes (VmHWM).
        processor: processor seconds, of the server and of all clients, from the first round's start to the end.
        skipped: syncs that did nothing; None: they were real.
    """

    began: dict[int, float] = field(default_factory=dict)
    rss: dict[int, float] = field(default_factory=dict)
    peak: float = 0.0
    processor: tuple[float, float] = (0.0, 0.0)
    skipped: int | None = None

    def seconds(self) -> list[float]:
        """Of each round but the first, in which the server takes its memory."""
        times = [self.began[number] for number in sorted(self.began)]
        return [after - before for before, after in pairwise(times[1:])]

    def growth(self) -> float:
        """Kilobytes of resident memory a round: the least-squares slope over the later three quarters."""
        numbers = sorted(self.rss)[len(self.rss) // 4 :]
        return float(np.polyfit(numbers, [1000 * self.rss[number] for number in numbers], 1)[0])


def measure(case: Case, folder: Path, *, durable: bool = True) -> Seen:
    """One server process from its start to the end of its run."""
    with server(case.recipe, folder, durable=durable) as (process, address):
        seen, lock, spent = Seen(), threading.Lock(), dict[int, tuple[float, float]]()

        def note(number: int) -> None:
            with lock:
                if number not in seen.began:
                    seen.began[number] = time.perf_counter()
                    seen.rss[number], seen.peak = memory(process.pid)
                    spent[number] = processor(process.pid), time.process_time()

        with ThreadPoolExecutor(case.sites) as pool:
            list(pool.map(lambda index: _Echo(case, address, index, note).run(), range(case.sites)))
        note(case.rounds + 1)
    (before, clients), (after, clients_after) = spent[1], spent[case.rounds + 1]
    seen.processor = after - before, clients_after - clients
    if not durable:
        seen.skipped = skipped_syncs(folder)
    return seen


@dataclass
class _Echo:
    """A site that sends back what it got, with its mark."""

    case: Case
    address: str
    index: int
    note: Any

    def run(self) -> None:
        roles = frozenset(Role) if self.index == 0 else frozenset({Role.TRAINER})
        names = f"site-{self.index}", f"echo-{self.index}"
        link = GrpcLink(self.address, *names, roles, identity=None, audit=audit(), give_up_after_s=60.0)
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

    def _do(self, link: GrpcLink, task: Task) -> None:
        match task.kind:
            case TaskKind.INITIALISE:
                self._push(link, task, self.case.model())
            case TaskKind.FIT:
                self.note(task.round)
                self._push(link, task, self._marked(codec.decode(link.fetch(task))))
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


def measured(case: Case, *, durable: bool = True) -> Seen:
    """`measure` in a folder of its own, on this machine's disk."""
    with tempfile.TemporaryDirectory(prefix="protofed-echo-", dir=os.environ.get("ECHO_STATE")) as folder:
        return measure(case, Path(folder), durable=durable)


def durability(case: Case, repetitions: int) -> dict[str, Any]:
    """Seconds a round with real syncs and without, in turns."""
    found: dict[bool, list[Seen]] = {True: [], False: []}
    for _ in range(repetitions):
        for durable in (True, False):
            found[durable].append(measured(case, durable=durable))
    rounds = {durable: [value for seen in several for value in seen.seconds()] for durable, several in found.items()}
    real, none = (statistics.median(rounds[durable]) for durable in (True, False))
    skipped = statistics.median((seen.skipped or 0) / case.rounds for seen in found[False])
    return {
        **asdict(case),
        "seconds": real,
        "seconds_without_sync": none,
        "ratio": real / none,
        "syncs_a_round": skipped,
        "processor_a_round": _processor(case, found[True]),
        "processor_a_round_without_sync": _processor(case, found[False]),
        "peak_mb": max(seen.peak for seen in found[True]),
        "all": {"durable": rounds[True], "without_sync": rounds[False]},
    }


def _processor(case: Case, several: list[Seen]) -> dict[str, float]:
    """Processor seconds a round; other processes of the machine do not disturb them as much as the clock."""
    return {
        name: statistics.median(seen.processor[which] for seen in several) / case.rounds
        for which, name in enumerate(("server", "clients"))
    }


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Of `make bench`: in a process without torch."""
    command = [sys.executable, "-m", "tests.bench.echo", "--rounds=4", "--repetitions=1"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    what = f"server round, {told['sites']} echo sites × {told['megabytes']:.0f} MB, peak {told['peak_mb']:.0f} MB"
    yield what, f"{told['seconds']:.2f} s", f"without fsync {told['seconds_without_sync']:.2f} s", _ratio(told), ""


def _ratio(told: dict[str, Any]) -> str:
    return f"{told['ratio']:.2f}"


def main() -> None:
    """Print what was measured as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", action="store_true", help="500 rounds of 4 × 1 MB: how the server's memory grows")
    parser.add_argument("--small", action="store_true", help="32 × 1 MB")
    for name, kind in (("megabytes", float), ("sites", int), ("rounds", int), ("repetitions", int)):
        parser.add_argument(f"--{name}", type=kind)
    given = parser.parse_args()
    keep_memory()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is printed is the result
    base = Case(1.0, 4, 500) if given.memory else Case(1.0, 32, 20) if given.small else Case(45.0, 8, 6)
    case = Case(given.megabytes or base.megabytes, given.sites or base.sites, given.rounds or base.rounds)
    if not (given.memory or given.small):
        told = durability(case, given.repetitions or 2)
    else:
        seen = measured(case)
        told = {**asdict(case), "seconds": statistics.median(seen.seconds()), "peak_mb": seen.peak}
        told["processor_a_round"] = _processor(case, [seen])
        if given.memory:
            every = {number: round(seen.rss[number], 1) for number in sorted(seen.rss) if number % 25 == 1}
            told |= {"rss_mb": every, "growth_kb_a_round": seen.growth()}
    print(json.dumps(told, indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
