"""The store of a simulated site in a run under secure sums: an update counts once it is in a sum, as a daemon's does.

A daemon sends its numbers when its group is known to be whole. A simulated site hands its update in before, as without
sums, and one that was set aside for its group must leave no trace on the site either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from protofed.client.state.store import COUNTED, Store
from protofed.common.protocol.messages import Receipt, Task, Verdict
from protofed.server.storage.reader import LedgerReader


def settled_when_summed(store: Store, ledger: LedgerReader) -> Store:
    """A site's store that settles an update when the attempt at its round is closed."""
    return cast("Store", _SumStore(store, lambda task: _is_summed(ledger, task)))


class _SumStore:
    """Settles what is known by now before anything else is asked of the store.

    Args:
        is_summed: whether an update is in the sum of its round; None: that is not known yet.
    """

    def __init__(self, store: Store, is_summed: Callable[[Task], bool | None]) -> None:
        self._store, self._is_summed = store, is_summed
        self._waiting: dict[str, tuple[Task, Receipt]] = {}  # by task_id

    def settle(self, task: Task, receipt: Receipt) -> None:
        """See `Store.settle`."""
        if receipt.verdict in COUNTED:
            self._waiting[task.task_id] = task, receipt
        else:
            self._store.settle(task, receipt)

    def __getattr__(self, name: str) -> Any:
        for task, receipt in list(self._waiting.values()):
            if (summed := self._is_summed(task)) is not None:
                del self._waiting[task.task_id]
                self._store.settle(task, receipt if summed else replace(receipt, verdict=Verdict.STALE))
        return getattr(self._store, name)


def _is_summed(ledger: LedgerReader, task: Task) -> bool | None:
    row = ledger.task(task.task_id)
    assert row is not None  # noqa: S101  (the ledger gave the task)
    rounds = ledger.rounds(row.run, since=row.round)
    (attempt,) = (each for each in rounds if (each.round, each.attempt) == (row.round, row.attempt))
    if attempt.closed_at is None:
        return None
    update = ledger.accepted(row)
    return attempt.state is not None and update is not None and update.counts
