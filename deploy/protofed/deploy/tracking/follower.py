"""Experiment trackers follow a server's runs by reading its ledger: none can delay a run or lose a round.

What a tracker has is recorded with the tracker itself. So each round is written once, however often the server or the
tracker restarts, and rounds that ended while the tracker was away are written later.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import structlog

from protofed.common.errors import ConfigError
from protofed.common.version import install_hint
from protofed.deploy.tracking.round_metrics import (
    RoundMetrics,
    TrackedRun,
    complete_rounds,
    outcome,
    published,
    round_metrics,
    valid_rounds,
)
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RunRow

log = structlog.get_logger()
EVERY_S = 2.0  # between two looks at the ledger
RETRY_S, MAX_RETRY_S = 10.0, 300.0  # after one failure, doubled with each further one, up to the second
STOP_S = 15.0  # that a server waits for a tracker when it stops


class RunWriter(Protocol):
    """Writes one run to a tracker; each method also records what the tracker has then."""

    @property
    def tracked(self) -> TrackedRun:
        """What the tracker has of the run."""

    def roll_back(self, rounds: int) -> None:
        """Keep the first `rounds` rounds only: the run was rolled back."""

    def write(self, metrics: RoundMetrics) -> None:
        """Add the next round."""

    def end(self, row: RunRow) -> None:
        """Write the run's outcome, or that it continues after all."""


class Tracker(Protocol):
    """An experiment tracker. Its methods may raise anything: the follower tries again later."""

    name: str

    @contextmanager
    def open(self, row: RunRow) -> Iterator[RunWriter]:
        """The writer of a run, which the tracker creates if it does not have it."""


def sync_run(ledger: LedgerReader, row: RunRow, writer: RunWriter) -> int:
    """Write the rounds that a tracker does not have yet of a run, and its outcome; the number of rounds."""
    rows = ledger.rounds(row.run)
    valid = valid_rounds(writer.tracked, published(rows))
    if valid < len(writer.tracked.attempts):
        writer.roll_back(valid)
    new = complete_rounds(rows, row.ended_at is not None)[valid:]
    for round_row in new:
        writer.write(round_metrics(ledger, round_row, rows))
    if outcome(row) != writer.tracked.outcome:
        writer.end(row)
    return len(new)


class Follower(threading.Thread):
    """A thread that writes all runs of a ledger to one tracker as they go on.

    Args:
        url: of the ledger's database.
        every_s: seconds between two looks at the ledger.
    """

    def __init__(self, url: str, tracker: Tracker, every_s: float = EVERY_S) -> None:
        super().__init__(name=f"tracker-{tracker.name}", daemon=True)
        self._url, self._tracker, self._every_s = url, tracker, every_s
        self._end = threading.Event()
        self._writers: dict[str, tuple[RunWriter, ExitStack]] = {}  # of running runs
        self._finished: dict[str, RunRow] = {}  # runs that were written to their end
        self._failed = 0  # consecutive failures

    def run(self) -> None:
        """Follow until stopped, then write once more what is new."""
        ending = False
        while not ending:
            wait_s = min(RETRY_S * 2 ** (self._failed - 1), MAX_RETRY_S) if self._failed else self._every_s
            ending = self._end.wait(wait_s)
            self._poll(last=ending)
        self._abandon()

    def stop(self) -> None:
        """Write what is new and end; waits for at most `STOP_S`. The thread is a daemon, so a stuck one is left."""
        self._end.set()
        self.join(STOP_S)

    def _poll(self, *, last: bool) -> None:
        try:
            with closing(LedgerReader(self._url)) as ledger:
                for row in ledger.runs():
                    self._follow(ledger, row)
        except Exception as error:  # a tracker's library may raise anything; the server must not notice
            self._failed += 1
            self._abandon()
            fields = {"tracker": self._tracker.name, "why": f"{type(error).__name__}: {error}"[:500]}
            if last:
                log.error("a tracker lacks the newest rounds; `protofed tracking sync` adds them", **fields)
            else:
                log.warning("a tracker failed; trying again", **fields)
            return
        if self._failed:
            log.info("a tracker has caught up", tracker=self._tracker.name)
        self._failed = 0

    def _follow(self, ledger: LedgerReader, row: RunRow) -> None:
        ended = row.ended_at is not None
        # Rows are compared, for a run that ended may go on after a rollback. One without a round has nothing to write.
        if self._finished.get(row.run) == row or not (ended or ledger.newest_attempt(row.run, 0)):
            return
        if row.run not in self._writers:
            with ExitStack() as resources:
                writer = resources.enter_context(self._tracker.open(row))
                self._writers[row.run] = writer, resources.pop_all()
        sync_run(ledger, row, self._writers[row.run][0])
        if ended:
            self._close(row.run)
            self._finished[row.run] = row

    def _close(self, run: str) -> None:
        _, resources = self._writers.pop(run)
        resources.close()

    def _abandon(self) -> None:
        """Close all writers, so that the tracker is opened anew. What was not written is told anew."""
        for run in list(self._writers):
            with suppress(Exception):  # on a full disk closing fails as writing did
                self._close(run)


def trackers(tensorboard: Path | None, mlflow: str | None) -> list[Tracker]:
    """The trackers that the settings name: a folder for TensorBoard, a URI for MLflow.

    Raises:
        ConfigError: a library that one of them needs is not installed, or its address cannot be used.
    """
    chosen: list[Tracker] = []
    if tensorboard is not None:
        _check_installed("tensorboardX", "tensorboard")
        from protofed.deploy.tracking.tensorboard import EventFiles

        chosen.append(EventFiles(tensorboard))
    if mlflow is not None:
        _check_installed("mlflow", "mlflow")
        from protofed.deploy.tracking.mlflow import Mlflow

        chosen.append(Mlflow(mlflow))
    return chosen


@contextmanager
def following(url: str, trackers: Sequence[Tracker]) -> Iterator[None]:
    """Run a follower of the ledger for each tracker; separate threads, so that a slow tracker delays no other."""
    followers = [Follower(url, tracker) for tracker in trackers]
    for follower in followers:
        follower.start()
    try:
        yield
    finally:
        for follower in followers:
            follower.stop()


def _check_installed(module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise ConfigError(f"{extra}: {module} is not installed: {install_hint(extra)}")
