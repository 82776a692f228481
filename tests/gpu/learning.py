"""FedNH against FedAvg on CIFAR-10, Dir(0.3), 100 sites, 200 rounds: FedNH's Table 1, by the recipes that come with
protofed, in float32. All runs go side by side, each in a process of its own, for as long as there is time.

In a rehearsal the same with the digits, for a few rounds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.gpu import cifar
from tests.gpu.federation import Job, Progress
from tests.gpu.plan import Proof, skipped
from tests.gpu.processes import Process, ended, started
from tests.gpu.report import Finding, Found, Status, Table

RECIPES = ("cifar10-dir03-fedavg", "cifar10-dir03-fednh")
REHEARSED = ("digits-fedavg", "digits-fednh")
PUBLISHED = (  # Dai et al. (AAAI 2023), Table 1; in percent: GM, PM(V), PM(L)
    ("FedAvg, published (200 rounds)", "66.40", "63.10", "84.08"),
    ("FedNH, published (200 rounds)", "69.01", "65.02", "84.63"),
)
COLUMNS = {"GM": "global.accuracy", "PM(V)": "personal.pm_v", "PM(L)": "personal.pm_l"}
ROUNDS = (10, 25, 50, 100, 150, 200)  # of the curve
SPARE_S = 10.0  # that a process has to end by itself, before it is killed
POLL_S = 0.5


def work(proof: Proof) -> Iterator[Found]:
    """Yield what was found, whenever a process has written more."""
    if not proof.rehearsal and proof.data is None:
        yield skipped("FedNH against FedAvg", "no CIFAR-10: set PROTOFED_DATA, or give --data FOLDER or FILE.npz")
        return
    recipes = REHEARSED if proof.rehearsal else RECIPES
    jobs = [job_of(proof, recipe, seed) for recipe in recipes for seed in proof.seeds]
    with ExitStack() as running:
        processes = [running.enter_context(started("federation", _written(job))) for job in jobs]
        seen: list[Progress | None] = [None] * len(jobs)
        while any(process.poll() is None for process in processes) and proof.left > 0:
            time.sleep(POLL_S)
            if (now := [Progress.read(Path(job.progress)) for job in jobs]) != seen:
                seen = now
                yield from _found(jobs, seen)
        yield from _found(jobs, [Progress.read(Path(job.progress)) for job in jobs])
        yield from _failures(jobs, processes)


def job_of(proof: Proof, recipe: str, seed: int) -> Job:
    """The job of a recipe and a seed, which ends in time."""
    progress = str(proof.scratch / f"{recipe}-{seed}.progress.json")
    overrides: dict[str, Any] = {"plan": {"amp": False}}  # float32, as in the papers
    if proof.rehearsal:
        overrides["rounds"] = 3
    elif proof.data is not None:
        overrides["data"] = cifar.data_of(proof.data)
    return Job(recipe, seed, overrides, str(proof.device), proof.deadline - SPARE_S, progress)


def findings(runs: Sequence[Progress]) -> Iterator[Found]:
    """One finding for each run, and the two tables of all, as far as they have come."""
    for run in runs:
        what = f"{run.recipe}, seed {run.seed}"
        numbers = {f"{name}@{number}": value for number, by in run.scores.items() for name, value in by.items()}
        done = f"{run.rounds} of {run.of} rounds in {run.seconds:.0f} s"
        whole = run.ended and run.rounds == run.of
        yield Finding(what, done, f"{run.of} rounds", Status.PASSED if whole else Status.BEGUN, numbers)
    published = PUBLISHED if all(run.recipe in RECIPES for run in runs) else ()
    yield Table(
        "Scores in %, ours after as many rounds as the row says", ("", *COLUMNS), [*published, *map(_row, runs)]
    )
    rounds = sorted({number for run in runs for number in run.scores if number in ROUNDS})
    if rounds:
        curve = [(_name(run), *(_percent(run, number, COLUMNS["GM"]) for number in rounds)) for run in runs]
        yield Table("GM in % at round", ("", *map(str, rounds)), curve)


def _found(jobs: Sequence[Job], seen: Sequence[Progress | None]) -> Iterator[Found]:
    started = [
        run or Progress(job.recipe, job.seed, job.prepared().rounds) for job, run in zip(jobs, seen, strict=True)
    ]
    yield from findings(started)


def _failures(jobs: Sequence[Job], processes: Sequence[Process]) -> Iterator[Finding]:
    for job, process in zip(jobs, processes, strict=True):
        if process.poll() is None:
            continue  # its time was over
        try:
            killed = ended(process, SPARE_S)
            problem = f"ended by signal {-killed}" if killed else ""
        except RuntimeError as error:
            problem = str(error)
        if problem:
            yield Finding(f"{job.recipe}, seed {job.seed}", problem, "no error", Status.FAILED)


def _written(job: Job) -> Path:
    path = Path(job.progress).with_suffix(".job")
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")
    return path


def _row(run: Progress) -> tuple[str, ...]:
    last = max(run.scores, default=0)
    return (f"{_name(run)} ({last} rounds)", *(_percent(run, last, name) for name in COLUMNS.values()))


def _name(run: Progress) -> str:
    return f"{run.recipe}, seed {run.seed}"


def _percent(run: Progress, round: int, name: str) -> str:
    value = run.scores.get(round, {}).get(name)
    return "–" if value is None else f"{100 * value:.1f}"
