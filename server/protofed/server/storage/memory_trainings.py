"""What sites trained, for a ledger in memory: example counts, and the rounds in which an update stands."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Mapping

from protofed.common.payload import SiteId
from protofed.server.storage.rows import RoundRow, TaskRow, UpdateRow


class MemoryTrainings:
    """Accepted updates by run and site."""

    def __init__(self) -> None:
        self._weights: dict[tuple[str, SiteId], float] = {}  # the newest
        self._attempts: defaultdict[str, defaultdict[SiteId, list[tuple[int, int]]]] = defaultdict(
            lambda: defaultdict(list)
        )  # round and attempt, in their order

    def add(self, row: UpdateRow, task: TaskRow) -> None:
        """Note an update, if it was accepted."""
        if row.is_accepted and row.weight is not None:
            self._weights[task.run, task.site] = row.weight
        if row.is_accepted and task.brings_training:
            insort(self._attempts[task.run][task.site], (task.round, task.attempt))

    def weight(self, run: str, site: SiteId) -> float | None:
        """As `LedgerReader.last_weight`."""
        return self._weights.get((run, site))

    def standing(self, run: str, rows: Mapping[tuple[int, int], RoundRow]) -> dict[SiteId, int]:
        """As `LedgerReader.standing_rounds`, of a run's attempts."""
        stand = {at for at, row in rows.items() if row.state is not None and not row.rolled_back}
        newest = {
            site: next((at[0] for at in reversed(ats) if at in stand), None)
            for site, ats in self._attempts[run].items()
        }
        return {site: number for site, number in newest.items() if number is not None}
