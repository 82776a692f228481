"""Several workers: who does what is decided here, and no byte of the result depends on it, whoever is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from protofed.client.agent.computation import Computation, ScoredModel
from protofed.client.data.shared import Contents
from protofed.client.state.store import SiteState
from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import CodecError, RunFailedError
from protofed.common.protocol.messages import Task, TaskKind
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import Simulation, simulation
from protofed.deploy.simulation.worker import SiteWorker
from protofed.deploy.simulation.worker_processes import WorkerProcesses, choose_workers
from protofed.deploy.simulation.workers import Answer, Beginning, Lost, Work, Workers, WorkResult
from protofed.server.storage.database import LEDGER_FILE

Recipes = Callable[..., Recipe]
BASE = codec.encode({})


class Paper:
    """A pool that writes down what it gets and says what it is told to."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.started: list[int] = []
        self.sent: list[tuple[int, Work, int]] = []  # worker, work and frames
        self.coming: deque[tuple[int, Answer | Lost]] = deque()

    def start(self, worker: int, beginning: Beginning) -> None:
        self.started.append(worker)

    def submit(self, worker: int, work: Work, frames: Sequence[bytes]) -> None:
        assert work.frames == len(frames)
        self.sent.append((worker, work, len(frames)))

    def results(self, *, wait: bool) -> Sequence[tuple[int, Answer | Lost]]:
        assert self.coming or not wait, "waits for what never comes"
        return [self.coming.popleft()] if wait else []

    def close(self) -> None: ...

    def answers(self, *works: int, **changes: Any) -> None:
        """The result of each of these, by its place in `sent`."""
        for at in works:
            worker, work, _ = self.sent[at]
            result = WorkResult(number=work.number, **(changes or {"scores": {"at": float(at)}}))
            self.coming.append((worker, (result, ())))


@pytest.fixture
def paper() -> Paper:
    return Paper(2)


@pytest.fixture
def workers(paper: Paper, recipe_of: Recipes) -> Workers:
    contents = {"arrays": (), "examples": (), "sites": {}, "nbytes": 0}
    beginning = {"recipe": recipe_of("fedavg").model_dump_json(), "plugins": (), "device": "cpu", "data": contents}
    return Workers(paper, Beginning.model_validate(beginning), lambda _: BASE)


def scoring(site: str, *, examples: int = 1, round: int = 1, base: str = "base") -> Computation:
    run: Any = SimpleNamespace(data=SimpleNamespace(test=range(examples)), method=SimpleNamespace(personal="trained"))
    run.seed, run.dp = 0, None
    task = Task(TaskKind.SCORE, "run", round, f"{site}-{round}", Digest(base), 1, 0.0)
    return Computation(site, run, task, SiteState(), scored=ScoredModel.GLOBAL)


def test_the_longest_is_started_first_and_a_worker_has_two_at_most(paper: Paper, workers: Workers) -> None:
    works = [scoring(f"site-{number}", examples=number) for number in range(1, 7)]
    workers.prefetch(1, lambda: works)
    assert paper.started == [0, 1]
    assert [(worker, work.site) for worker, work, _ in paper.sent] == [
        (0, "site-6"),
        (1, "site-5"),
        (0, "site-4"),
        (1, "site-3"),
    ]
    paper.answers(0)
    assert workers.score(works[5]) == {"at": 0.0}
    assert [(worker, work.site) for worker, work, _ in paper.sent[4:]] == [(0, "site-2")]


def test_results_are_taken_in_whichever_order_they_come(paper: Paper, workers: Workers) -> None:
    works = [scoring(f"site-{number}") for number in range(3)]
    workers.prefetch(1, lambda: works)
    paper.answers(1, 0, 2)
    assert [workers.score(work) for work in works] == [{"at": 0.0}, {"at": 1.0}, {"at": 2.0}]


def test_a_base_is_sent_to_a_worker_once(paper: Paper, workers: Workers) -> None:
    works = [scoring(f"site-{number}") for number in range(4)] + [scoring("other", base="other")]
    workers.prefetch(1, lambda: works)
    paper.answers(0)
    workers.score(works[0])
    assert [(work.sent, frames) for _, work, frames in paper.sent] == [
        (True, 2),
        (True, 2),
        (False, 1),
        (False, 1),
        (True, 2),
    ]


def test_what_nobody_foresaw_is_computed_when_it_is_asked_for(paper: Paper, workers: Workers) -> None:
    paper.coming.append((0, (WorkResult(number=0, scores={"x": 0.5}), ())))
    assert workers.score(scoring("late")) == {"x": 0.5}
    assert [work.site for _, work, _ in paper.sent] == ["late"]


def test_what_a_new_moment_does_not_expect_is_forgotten(paper: Paper, workers: Workers) -> None:
    old, kept, new = scoring("old"), scoring("kept"), scoring("new")
    workers.prefetch(1, lambda: [old, kept])
    workers.prefetch(1, lambda: pytest.fail("it is the same moment"))
    workers.prefetch(2, lambda: [kept, new])
    paper.answers(0, 1, 2)
    assert (workers.score(new), workers.score(kept)) == ({"at": 2.0}, {"at": 1.0})
    assert [work.site for _, work, _ in paper.sent] == ["old", "kept", "new"]


def test_what_a_worker_could_not_compute_is_left_to_the_site(paper: Paper, workers: Workers) -> None:
    work = scoring("site-1")
    workers.prefetch(1, lambda: [work])
    paper.answers(0, failed="ValueError: no such tensor")
    assert workers.score(work) is None


def test_a_worker_that_is_lost_is_replaced_and_its_work_is_done_again(paper: Paper, workers: Workers) -> None:
    works = [scoring(f"site-{number}") for number in range(3)]
    workers.prefetch(1, lambda: works)
    paper.coming.append((0, Lost("was killed by SIGKILL")))
    paper.answers(1)
    with structlog.testing.capture_logs() as logs:
        assert workers.score(works[1]) == {"at": 1.0}
    assert [entry["why"] for entry in logs] == ["it was killed by SIGKILL at site-0's scores of round 1"]
    assert paper.started == [0, 1, 0]
    assert [(worker, work.site, work.sent) for worker, work, _ in paper.sent[3:]] == [
        (0, "site-0", True),
        (0, "site-2", False),
    ]


def test_what_a_lost_worker_had_of_a_moment_that_is_over_is_not_done_again(paper: Paper, workers: Workers) -> None:
    new = scoring("new")
    workers.prefetch(1, lambda: [scoring("old", base="removed since")])
    workers.prefetch(2, lambda: [new])
    paper.coming.append((0, Lost("was killed by SIGKILL")))
    paper.answers(1)
    assert workers.score(new) == {"at": 1.0}
    assert [work.site for _, work, _ in paper.sent] == ["old", "new"]


def test_work_at_which_workers_end_again_and_again_ends_the_run_by_name(paper: Paper, workers: Workers) -> None:
    workers.prefetch(1, lambda: [scoring("site-7", round=4)])
    paper.coming += [(0, Lost("was killed by SIGKILL"))] * 2
    with pytest.raises(RunFailedError, match=r"killed by SIGKILL at site-7's scores of round 4, 2 times"):
        workers.score(scoring("site-7", round=4))


def test_a_worker_that_cannot_take_a_base_computes_nothing_from_the_one_before(
    paper: Paper, workers: Workers, recipe_of: Recipes
) -> None:
    contents = Contents(arrays=(), examples=(), sites={}, nbytes=0)
    recipe = recipe_of("fedavg").model_dump_json()
    worker = SiteWorker(Beginning(recipe=recipe, plugins=frozenset(), device="cpu", data=contents), memoryview(b""))
    workers.prefetch(1, lambda: [scoring("site-1")])
    ((_, work, _),) = paper.sent
    with pytest.raises(CodecError):
        worker.carry_out(work, [b"cut short", BASE])


@pytest.mark.parametrize(("started", "error", "code"), [(0, "EOFError", 0), (1, "EOFError", 0), (1, "MemoryError", 1)])
def test_a_worker_that_hears_nothing_any_more_ends(started: int, error: str, code: int, recipe_of: Recipes) -> None:
    beginning = {
        "recipe": recipe_of("fedavg").model_dump_json(),
        "plugins": [],
        "device": "cpu",
        "data": {"arrays": [], "examples": [], "sites": {}, "nbytes": 64},
    }
    ended = subprocess.run(
        [sys.executable, "-c", DEAF, json.dumps(beginning), str(started), error],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (code, "")


DEAF = """
import builtins, os, sys
from protofed.deploy.simulation.worker import serve

class Connection:
    coming = [sys.argv[1].encode()] * int(sys.argv[2])

    def recv_bytes(self):
        if self.coming:
            return self.coming.pop()
        raise getattr(builtins, sys.argv[3])

block = os.memfd_create("data")
os.ftruncate(block, 64)
serve(Connection(), block)
"""  # a worker whose end of the connection says what it is told to


def rows(state: Path) -> dict[str, list[tuple[object, ...]]]:
    """All rows of the ledger but what differs between any two runs: times and random ids."""
    random = ("task_id", "record_hash")  # the hash is of a receipt that names the task_id
    with contextlib.closing(sqlite3.connect(state / LEDGER_FILE)) as ledger:
        names = [name for (name,) in ledger.execute("select name from sqlite_master where type = 'table'")]
        columns = {name: [row[1] for row in ledger.execute(f"pragma table_info({name})")] for name in names}
        kept = {
            name: [column for column in found if not column.endswith("at") and column not in random]
            for name, found in columns.items()
        }
        return {name: ledger.execute(f"select {','.join(kept[name])} from {name}").fetchall() for name in names}  # noqa: S608


def end(running: Simulation) -> tuple[str, object]:
    published = running.run.published
    assert published is not None
    return published.address, running.ledger.scores(running.recipe.name)


def workers_of(parent: int) -> list[int]:
    """Worker processes, by the process that began them."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may just have ended
            ppid = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if ppid == parent and "simulation.worker" in (path / "cmdline").read_text():
                found.append(int(path.name))
    return sorted(found)


def test_a_killed_worker_changes_no_row_of_the_ledger(recipe_of: Recipes, tmp_path: Path) -> None:
    recipe = recipe_of("fednh")
    with simulation(recipe, tmp_path / "one") as running:
        running.go()
        expected = end(running)
    killed: list[int] = []
    with simulation(recipe, tmp_path / "two", pool=partial(WorkerProcesses, 2)) as running:

        def kill() -> None:
            if getattr(running.run.phase, "round", 0) == 2 and not killed:
                killed.append(workers_of(os.getpid())[0])
                os.kill(killed[0], signal.SIGKILL)

        running.go(on_task=kill)
        assert end(running) == expected
        assert killed
        left = workers_of(os.getpid())
        assert len(left) == 2
    assert workers_of(os.getpid()) == []
    assert choose_workers(1) is None  # one needs no other process
    assert rows(tmp_path / "two") == rows(tmp_path / "one")


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_simulation_that_ends_takes_its_workers_along_and_goes_on_with_others(
    number: signal.Signals, tmp_path: Path
) -> None:
    settings, state = ["rounds=100000"], tmp_path / "state"  # it does not end before it is ended
    command = [sys.executable, "-m", "protofed.deploy.cli", "simulate", "digits-fedavg", f"--state={state}"]
    command += [f"--set={setting}" for setting in settings] + ["--workers=2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: any(state.glob("sites/*/*/000001/receipt.json")))
        children = workers_of(process.pid)
        assert len(children) == 2
        process.send_signal(number)
        assert process.wait(60) != 0
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    recipe = shipped.recipe("digits-fedavg", settings)
    with simulation(recipe, state, pool=choose_workers(2)) as running:
        more = len(states(running)) + 1
        running.go(until=lambda: len(states(running)) > more)
        found = states(running)
    with simulation(recipe) as running:
        running.go(until=lambda: len(states(running)) >= len(found))
        assert states(running)[: len(found)] == found


def states(running: Simulation) -> list[str | None]:
    return [row.state for row in running.ledger.rounds(running.recipe.name) if row.state is not None]


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)
