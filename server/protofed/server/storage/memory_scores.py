"""The scores of a ledger in memory: those of each site, and what sums of them say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TypeAlias

from protofed.common.errors import StateError
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import Scores
from protofed.common.protocol.scores import Spread
from protofed.server.storage.rows import TaskRow

Attempt: TypeAlias = tuple[int, int]  # its round, and its number


class MemoryScores:
    """By run, then by round and attempt; `MemoryLedger` knows which of these were rolled back."""

    def __init__(self) -> None:
        self._by_site: defaultdict[str, dict[int, dict[int, dict[SiteId, dict[str, float]]]]] = defaultdict(dict)
        self._sums: defaultdict[str, dict[int, dict[int, dict[str, Spread]]]] = defaultdict(dict)

    def add(self, task: TaskRow, scores: Scores) -> None:
        """See `Ledger.add_scores`."""
        of_round = self._by_site[task.run].setdefault(task.round, {}).setdefault(task.attempt, {})
        if of_round.get(task.site, {}).keys() & scores.keys():
            raise contradiction(f"a score of {task.site} in round {task.round}")
        if scores:
            of_round.setdefault(task.site, {}).update({name: float(value) for name, value in scores.items()})

    def sum(self, run: str, at: Attempt, names: Collection[str], sums: Mapping[str, Spread]) -> None:
        """See `Ledger.sum_scores`."""
        number, attempt = at
        single = self._by_site[run].get(number, {}).get(attempt, {})
        left = {
            site: {name: value for name, value in scores.items() if name not in set(names)}
            for site, scores in single.items()
        }
        self._by_site[run].setdefault(number, {})[attempt] = {site: scores for site, scores in left.items() if scores}
        self._sums[run].setdefault(number, {})[attempt] = dict(sums)

    def attempts(self, run: str, round: int | range | None) -> Iterator[Attempt]:
        """Those (of a round, or some) of which there are scores."""
        of_run: tuple[Mapping[int, Mapping[int, object]], ...] = self._by_site[run], self._sums[run]
        if isinstance(round, int):  # asked for after each round: looks at no other
            numbers = {round}
        else:
            numbers = {number for table in of_run for number in table if round is None or number in round}
        for number in numbers:
            yield from {(number, attempt) for table in of_run for attempt, of in table.get(number, {}).items() if of}

    def by_site(
        self, run: str, attempts: Iterable[Attempt], names: Collection[str] | None
    ) -> dict[int, dict[SiteId, dict[str, float]]]:
        """See `LedgerReader.scores`."""
        table: dict[int, dict[SiteId, dict[str, float]]] = {}
        for number, attempt in sorted(attempts):
            for site, values in sorted(self._by_site[run].get(number, {}).get(attempt, {}).items()):
                chosen = sorted(values.keys() if names is None else values.keys() & names)
                if chosen:
                    table.setdefault(number, {}).setdefault(site, {}).update({name: values[name] for name in chosen})
        return table

    def sums(
        self, run: str, attempts: Iterable[Attempt], names: Collection[str] | None
    ) -> dict[int, dict[str, Spread]]:
        """See `LedgerReader.score_sums`."""
        found: dict[int, dict[str, Spread]] = {}
        for number, attempt in sorted(attempts):
            for name, spread in sorted(self._sums[run].get(number, {}).get(attempt, {}).items()):
                if names is None or name in names:
                    found.setdefault(number, {})[name] = spread
        return found


def contradiction(what: str) -> StateError:
    """What a database says of a row that is there already."""
    return StateError(f"the ledger cannot be used: {what} stands there already; what is written contradicts it")
