"""Experiment trackers follow a server's runs by reading its ledger: none can delay a run or lose a round.

What a tracker has is recorded with the tracker itself. So each round is written once, however often the server or the
tracker restarts. Rounds that ended while the tracker was away are written later.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import structlog

from protofed.common.errors import ConfigError
from protofed.common.protocol.messages import TaskKind, score_family
from protofed.common.protocol.scores import spreads
from protofed.common.version import install_hint
from protofed.server.operator.run_record import read_attempts
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow, RunRow

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
                log.error("a tracker lacks the newest rounds; `protofed tracking` adds them", **fields)
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


MB = 1e6


@dataclass(frozen=True)
class RoundMetrics:
    """The numbers of one round.

    Attributes:
        attempt: the attempt that published the round's state.
        at: Unix time at which that attempt was closed.
        numbers: by tag, such as `scores/global.accuracy/mean`.
    """

    round: int
    attempt: int
    at: float
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker has of a run.

    Attributes:
        attempts: for each round, from round 0, the attempt whose numbers it has.
        outcome: how the run ended; empty: it goes on.
    """

    attempts: tuple[int, ...] = ()
    outcome: str = ""

    def pack(self) -> dict[str, object]:
        """For JSON. Nearly all rounds need one attempt, so only the others are listed."""
        again = {str(number): attempt for number, attempt in enumerate(self.attempts) if attempt != 1}
        return {"rounds": len(self.attempts), "again": again, "outcome": self.outcome}

    @classmethod
    def unpack(cls, packed: Mapping[str, object]) -> TrackedRun:
        """The inverse of `pack`.

        Raises:
            ValueError, TypeError, KeyError: `pack` has not made this.
        """
        count, again = packed["rounds"], packed["again"]
        if not isinstance(count, int) or not isinstance(again, dict):
            raise TypeError("expected what `pack` gives")
        return cls(tuple(int(again.get(str(number), 1)) for number in range(count)), str(packed["outcome"]))


def outcome(row: RunRow) -> str:
    """How a run ended, in words; empty while it goes on."""
    if row.outcome is None:
        return ""
    return row.outcome.value if row.reason in (None, row.outcome) else f"{row.outcome.value}: {row.reason}"


def published(rows: Sequence[RoundRow]) -> list[RoundRow]:
    """The attempts that published a state, one for each round from round 0; `rows` has none that was rolled back."""
    return [row for row in rows if row.state is not None]


def valid_rounds(tracked: TrackedRun, published_rows: Sequence[RoundRow]) -> int:
    """The number of rounds, from round 0, that a tracker has of the same attempts as the ledger."""
    # Not strict: a tracker may lack the newest rounds, or have more than a run that was rolled back.
    for number, (attempt, row) in enumerate(zip(tracked.attempts, published_rows, strict=False)):
        if attempt != row.attempt:
            return number
    return min(len(tracked.attempts), len(published_rows))


def complete_rounds(rows: Sequence[RoundRow], ended: bool) -> list[RoundRow]:
    """The published rounds whose numbers are final: they were scored, or the run has gone on or ended."""
    # Scores arrive after a round is published, so the newest round is incomplete until they are in or nobody sends any.
    published_rows = published(rows)
    if published_rows and not (ended or published_rows[-1].scored or rows[-1].round > published_rows[-1].round):
        return published_rows[:-1]
    return published_rows


def round_metrics(ledger: LedgerReader, row: RoundRow, rows: Sequence[RoundRow]) -> RoundMetrics:
    """The numbers of a published round.

    Args:
        rows: all attempts of the run that were not rolled back.
    """
    at = row.closed_at or row.opened_at
    attempts, _ = read_attempts(ledger, row.run, [attempt for attempt in rows if attempt.round == row.round])
    published = next(attempt for attempt in attempts if attempt["attempt"] == row.attempt)
    numbers = {"round/seconds": at - row.opened_at, "round/attempts": float(len(attempts))}
    numbers["round/degraded"] = float(published["outcome"] == "degraded")
    numbers |= _sites(published["tasks"]) | _transfers(attempts) | _scores(ledger, row)
    numbers |= {f"statistics/{name}": value for name, value in published["statistics"].items()}
    return RoundMetrics(row.round, row.attempt, at, numbers)


def _sites(tasks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    statuses = [task["task_status"] for task in tasks if task["kind"] in (TaskKind.INITIALISE, TaskKind.FIT)]
    count = Counter(statuses)
    counts = {
        "invited": len(statuses),
        "reported": count["reported"] + count["rejected"],
        "rejected": count["rejected"],
    }
    counts |= {"late": count["late"], "failed": count["failed"]}
    return {f"sites/{name}": float(number) for name, number in counts.items()}


def _transfers(attempts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """MB (10^6 bytes) over all attempts at the round."""
    tasks = [task for attempt in attempts for task in attempt["tasks"]]
    received, sent = (sum(task[way] for task in tasks) for way in ("received", "sent"))
    return {"transfer/received_mb": received / MB, "transfer/sent_mb": sent / MB}


def _scores(ledger: LedgerReader, row: RoundRow) -> dict[str, float]:
    """Scores over sites; those of single classes have a group of their own, for they are many."""
    numbers: dict[str, float] = {}
    single = ledger.scores(row.run, row.round).get(row.round, {})
    for name, spread in spreads(single, ledger.score_sums(row.run, row.round).get(row.round, {})).items():
        group = "scores" if score_family(name) == name else "classes"
        stats = {"mean": spread.mean, "std": spread.std, "worst": spread.worst}
        numbers |= {f"{group}/{name}/{stat}": value for stat, value in stats.items() if value is not None}
    return numbers
