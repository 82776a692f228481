"""A ledger's one writer: each transaction whole, each promise repeated in a journal before anybody is told of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from protofed.common.errors import StateError
from protofed.server.storage.database import open_ledger, state_error
from protofed.server.storage.reader import LedgerReader


class Chain(Protocol):
    """Where the ledger repeats what it promised: a hash-chained journal (`common/journal.py`)."""

    def append(self, event: str, **facts: Any) -> None:
        """Keep a record, durably."""


class LedgerWriter(LedgerReader):
    """A ledger that is written here."""

    def __init__(self, url: str = "sqlite://") -> None:
        self._engine = open_ledger(url)
        self._journal: Chain | None = None
        self._unwritten: deque[tuple[str, dict[str, Any]]] = deque()
        self._behind = False  # the journal could not be written when it was last tried

    def attach(self, journal: Chain) -> None:
        """Repeat every promise in a journal, which shows later that the database has lost none.

        A promise counts only when it stands in both: while the journal cannot be written, nothing else is.
        """
        self._journal = journal

    @property
    def is_settled(self) -> bool:
        """Whether the journal lacks nothing but what is being written; asked from any thread."""
        return not self._behind

    def settle_promises(self) -> None:
        """Write what the journal lacks, before anybody is told of it again.

        Raises:
            StateError: the journal cannot be written.
        """
        try:
            while self._journal is not None and self._unwritten:
                event, facts = self._unwritten[0]
                self._journal.append(event, **facts)
                self._unwritten.popleft()
        except StateError:
            self._behind = True
            raise
        self._behind = False

    def _promise(self, event: str, **facts: Any) -> None:
        if self._journal is not None:
            self._unwritten.append((event, facts))
            self.settle_promises()

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        self.settle_promises()
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise state_error(error) from error
