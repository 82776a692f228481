"""Experiment trackers that follow a server's runs by reading its ledger: none can hold a run up, or lose a round.

What a tracker has been told is kept with the tracker: so it is told each round once, however often anybody restarts,
and what it missed while it was away it is told later.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import structlog

from protofed.common.errors import ConfigError
from protofed.deploy.tracking.pages import Page, TrackedRun, outcome, page, published, settled, still_true
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RunRow

log = structlog.get_logger()
EVERY_S = 2.0
AGAIN_S, LONGEST_S = 10.0, 300.0  # after a failure, and after many
LAST_S = 15.0  # that the end of a server waits for a tracker


class Book(Protocol):
    """One run as a tracker has it."""

    @property
    def told(self) -> TrackedRun:
        """What it has."""

    def take_back(self, rounds: int) -> None:
        """Of its rounds only so many are still true: the run was rolled back."""

    def write(self, page: Page) -> None:
        """Add the next round."""

    def end(self, row: RunRow) -> None:
        """Say how the run has ended, or that it goes on again."""


class Tracker(Protocol):
    """A tracker; whatever its methods raise is tried again later."""

    name: str

    @contextmanager
    def open(self, row: RunRow) -> Iterator[Book]:
        """One run's, made if it is missing."""


def tell(records: LedgerReader, row: RunRow, book: Book) -> int:
    """Tell a tracker what it does not have yet of a run; how many rounds that were."""
    rows = records.rounds(row.run)
    keep = still_true(book.told, published(rows))
    if keep < len(book.told.attempts):
        book.take_back(keep)
    new = settled(rows, row.ended_at is not None)[keep:]
    for one in new:
        book.write(page(records, one, rows))
    if outcome(row) != book.told.outcome:
        book.end(row)
    return len(new)


class Follower(threading.Thread):
    """Tells one tracker of all runs, as they go on.

    Args:
        url: of the ledger.
    """

    def __init__(self, url: str, tracker: Tracker, every_s: float = EVERY_S) -> None:
        super().__init__(name=f"tracker-{tracker.name}", daemon=True)
        self._url, self._tracker, self._every_s = url, tracker, every_s
        self._end = threading.Event()
        self._books: dict[str, tuple[Book, ExitStack]] = {}  # of runs that go on
        self._done: dict[str, RunRow] = {}  # of which there is nothing more to tell
        self._failed = 0  # times, since it last went well

    def run(self) -> None:
        """Follow until stopped, then once more to the end."""
        ending = False
        while not ending:
            rest_s = min(AGAIN_S * 2 ** (self._failed - 1), LONGEST_S) if self._failed else self._every_s
            ending = self._end.wait(rest_s)
            self._turn(last=ending)
        self._release(*self._books)

    def stop(self) -> None:
        """Tell what there is to tell, and end; a tracker that does not answer is not waited for long."""
        self._end.set()
        self.join(LAST_S)

    def _turn(self, *, last: bool) -> None:
        try:
            with closing(LedgerReader(self._url)) as records:
                for row in records.runs():
                    self._follow(records, row)
        except Exception as error:  # whatever a tracker does
            self._failed += 1
            self._release(*self._books)
            told = {"tracker": self._tracker.name, "why": f"{type(error).__name__}: {error}"[:500]}
            if last:
                log.error("a tracker lacks the newest rounds; `protofed tracking sync` tells it", **told)
            else:
                log.warning("a tracker cannot be told; trying again", **told)
            return
        if self._failed:
            log.info("a tracker was told what it had missed", tracker=self._tracker.name)
        self._failed = 0

    def _follow(self, records: LedgerReader, row: RunRow) -> None:
        ended = row.ended_at is not None
        if self._done.get(row.run) == row or not (ended or records.attempts(row.run, 0)):
            return
        if row.run not in self._books:
            with ExitStack() as held:
                book = held.enter_context(self._tracker.open(row))
                self._books[row.run] = book, held.pop_all()
        tell(records, row, self._books[row.run][0])
        if ended:
            self._release(row.run)
            self._done[row.run] = row

    def _release(self, *runs: str) -> None:
        """A tracker that was away is opened anew."""
        for run in runs:
            _, held = self._books.pop(run)
            held.close()


def trackers(tensorboard: Path | None, mlflow: str | None) -> list[Tracker]:
    """Those that are asked for.

    Raises:
        ConfigError: what one of them needs is not installed, or its address cannot be used.
    """
    found: list[Tracker] = []
    if tensorboard is not None:
        _check_installed("tensorboardX", "tensorboard")
        from protofed.deploy.tracking.tensorboard import EventFiles

        found.append(EventFiles(tensorboard))
    if mlflow is not None:
        _check_installed("mlflow", "mlflow")
        from protofed.deploy.tracking.mlflow import Mlflow

        found.append(Mlflow(mlflow))
    return found


@contextmanager
def following(url: str, told: Sequence[Tracker]) -> Iterator[None]:
    """Followers of a ledger, one for each tracker, so that none waits for another."""
    followers = [Follower(url, tracker) for tracker in told]
    for follower in followers:
        follower.start()
    try:
        yield
    finally:
        for follower in followers:
            follower.stop()


def _check_installed(module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise ConfigError(f"{extra}: {module} is not installed; pip install 'protofed[{extra}]'")
