"""One job of a comparison as a process of its own: `python -m protofed.deploy.experiments.job FOLDER DEVICE WORKERS`.

It says on standard output how it gets on, one JSON object a line, and ends when nobody listens any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from protofed.client.device import pick_device
from protofed.common.errors import ProtofedError, RunFailedError
from protofed.common.payload import SiteId
from protofed.common.process import keep_memory
from protofed.common.protocol.messages import TaskKind, Verdict
from protofed.common.protocol.scores import LOSS
from protofed.common.storage import files
from protofed.common.version import VERSION
from protofed.deploy import logs
from protofed.deploy.daemons.signals import stoppable
from protofed.deploy.experiments.code_digest import CodeDigest, digest_code
from protofed.deploy.experiments.experiment import SECONDS, ExperimentJob, Result, RoundTraffic
from protofed.deploy.progress import usable_cores
from protofed.deploy.simulation.run_tables import status
from protofed.deploy.simulation.simulation import NewPool, Simulation, held_out_scores, simulation
from protofed.deploy.simulation.worker_processes import choose_workers
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.rows import UpdateRow, one_a_site


def run_job(
    job: ExperimentJob, device: torch.device, report: Callable[[int, str], None], pool: NewPool | None = None
) -> None:
    """Simulate the job from where it is to its end and write its result.

    Args:
        report: called with the rounds that are done and what goes on.
        pool: as in `simulation`.

    Raises:
        ConfigError, DataError: the recipe or its data cannot be used.
        StateError: the folder is in use, or its state is another recipe's or other code's.
        RunFailedError: the run failed.
    """
    code = digest_code(job.recipe)
    job.begin(code)
    clock = _Stopwatch(job.folder / SECONDS)
    report(0, "loading")
    with simulation(job.recipe, job.state, device, pool=pool) as running:
        _go(running, clock, report)
        if running.runs.failed:
            job.write_failure(why := f"{running.runs.failed[0]}{running.refused}")
            raise RunFailedError(f"run failed: {why}; remove {job.folder} to begin it again")
        job.write_result(collect_result(running, clock.seconds, code, machine_class(device)))


def _go(running: Simulation, clock: _Stopwatch, report: Callable[[int, str], None]) -> None:
    noted = -1

    def turned() -> None:
        nonlocal noted
        rounds_done, doing = status(running.run.phase, running.recipe.rounds)
        report(rounds_done, doing)
        if rounds_done != noted:
            clock.note()
            noted = rounds_done

    turned()
    running.go(on_task=turned)


class _Stopwatch:
    """Wall-clock seconds over all processes that worked on a job, kept in a file; a killed one loses what it had not
    noted.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._began, self._before = file, time.monotonic(), 0.0
        with contextlib.suppress(FileNotFoundError):
            self._before = float(file.read_text(encoding="ascii"))

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._began

    def note(self) -> None:
        files.write(self._file, f"{self.seconds:.3f}".encode())


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201


def _end_with_parent() -> None:
    """Standard input is a pipe that nobody writes to: it ends when the parent does, however that came about."""

    def listen() -> None:
        while os.read(sys.stdin.fileno(), 1):  # sys.stdin's own lock would be held while the interpreter ends
            pass
        os._exit(1)  # all that counts is on disk

    threading.Thread(target=listen, daemon=True).start()


def main(folder: Path, device: str, workers: int) -> None:
    """Entry point of the process; always ends in SystemExit, unless it is asked to stop."""
    _end_with_parent()
    logs.configure()
    keep_memory()
    torch.set_num_threads(1)  # jobs side by side share the cores
    with stoppable():
        try:
            run_job(
                ExperimentJob.claimed(folder),
                pick_device(device),
                lambda rounds_done, doing: _say(done=rounds_done, doing=doing),
                choose_workers(workers),
            )
            sys.exit(0)
        except ProtofedError as error:
            _say(failed=str(error))
            sys.exit(error.exit_code)
        except Exception as error:
            _say(failed=f"internal error: {type(error).__name__}: {error}")
            raise
    sys.exit(1)  # asked to stop


def collect_result(running: Simulation, seconds: float, code: CodeDigest, machine: str) -> Result:
    """The result of a run that has ended well.

    Args:
        seconds: wall-clock time of the job, over its interruptions.
        code: that computed it.
        machine: as `machine_class` has it.
    """
    recipe, ledger, site_data = running.recipe, running.ledger, running.data
    state = [row.state for row in ledger.rounds(recipe.name) if row.state is not None][-1]
    used = _used(ledger, recipe.name)
    return Result(
        recipe=recipe,
        protofed=VERSION,
        seconds=seconds,
        state=state,
        scores=_with_losses(ledger.scores(recipe.name), {} if recipe.federation.secure else used),
        sums=ledger.score_sums(recipe.name),
        cohorts={number: tuple(update.task.site for update in updates) for number, updates in used.items()},
        train_examples={site: len(data.train) for site, data in site_data.items()},
        local_test_examples={
            site: len(data.local_test) for site, data in site_data.items() if data.local_test is not None
        },
        test_images=max((len(data.test) for data in site_data.values()), default=0),
        code=code,
        machine=machine,
        traffic={} if recipe.federation.secure else _traffic(ledger, recipe.name),
        trained=running.training.by_round(),
        held_out={site: dict(own) for site, own in held_out_scores(running).items()},
    )


def _used(ledger: Ledger, run: str) -> dict[int, list[UpdateRow]]:
    """By round, the updates that were aggregated."""
    _, *trained = (row for row in ledger.rounds(run) if row.state is not None)  # the first made the first model
    return {row.round: one_a_site(ledger.updates(run, row.round, row.attempt)) for row in trained}


def _with_losses(
    scores: dict[int, dict[SiteId, dict[str, float]]], used: Mapping[int, Sequence[UpdateRow]]
) -> dict[int, dict[SiteId, dict[str, float]]]:
    """The scores, with the training losses of scored rounds."""
    for update in (update for number in scores.keys() & used.keys() for update in used[number]):
        if LOSS in update.metrics:
            scores[update.task.round].setdefault(update.task.site, {})[LOSS] = update.metrics[LOSS]
    return scores


def _traffic(ledger: Ledger, run: str) -> dict[int, RoundTraffic]:
    """Bytes by round, but for round 0, which makes the first model and is the same for all methods."""
    received: dict[int, int] = {}
    sent: dict[int, int] = {}
    for update in ledger.updates(run):
        if update.verdict is Verdict.ACCEPTED and update.task.kind is TaskKind.FIT:
            received[update.task.round] = received.get(update.task.round, 0) + update.bytes
    for task in ledger.tasks(run):
        sent[task.round] = sent.get(task.round, 0) + task.bytes_sent
    return {number: RoundTraffic(up=received[number], down=sent.get(number, 0)) for number in sorted(received)}


_CPUS = Path("/proc/cpuinfo")


def machine_class(device: torch.device) -> str:
    """Such as `Linux x86_64, Intel(R) Xeon(R) CPU @ 2.20GHz, 2 cores; device cpu`."""
    cores = usable_cores()
    where = f"{platform.system()} {platform.machine()}, {_processor()}, {cores} core{'s' * (cores != 1)}"
    of = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return f"{where}; device {device.type}{of}"


def _processor() -> str:
    """The processor's model, as far as the system tells it."""
    lines = _CPUS.read_text(encoding="utf-8", errors="replace").splitlines() if _CPUS.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or "processor unknown"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
