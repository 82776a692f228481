"""What experiment trackers are told of a run: a page of numbers for every round that is over, from the ledger alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protofed.common.protocol.messages import TaskKind, Verdict, score_family
from protofed.common.statistics import spreads
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow, RunRow

MB = 1e6


@dataclass(frozen=True)
class Page:
    """One round in numbers, by tags as `scores/global.accuracy/mean`.

    Attributes:
        attempt: the one that published.
        at: seconds of the Unix epoch at which it was closed.
    """

    round: int
    attempt: int
    at: float
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker has been told of a run.

    Attributes:
        attempts: of each round, from round 0, the one whose page it has.
        outcome: with which the run ended; empty: it goes on.
    """

    attempts: tuple[int, ...] = ()
    outcome: str = ""

    def pack(self) -> dict[str, object]:
        """As JSON, small: nearly all rounds need one attempt."""
        again = {str(number): attempt for number, attempt in enumerate(self.attempts) if attempt != 1}
        return {"rounds": len(self.attempts), "again": again, "outcome": self.outcome}

    @classmethod
    def unpack(cls, said: Mapping[str, object]) -> TrackedRun:
        """Of `pack`.

        Raises:
            ValueError, TypeError, KeyError: it is something else.
        """
        count, again = said["rounds"], said["again"]
        if not isinstance(count, int) or not isinstance(again, dict):
            raise TypeError("expected what `pack` gives")
        return cls(tuple(int(again.get(str(number), 1)) for number in range(count)), str(said["outcome"]))


def outcome(row: RunRow) -> str:
    """How a run ended, in words; empty while it goes on."""
    if row.outcome is None:
        return ""
    return row.outcome.value if row.reason in (None, row.outcome) else f"{row.outcome.value}: {row.reason}"


def published(rows: Sequence[RoundRow]) -> list[RoundRow]:
    """Of the attempts that were not rolled back, those that count: one a round, from round 0."""
    return [row for row in rows if row.state is not None]


def still_true(told: TrackedRun, chain: Sequence[RoundRow]) -> int:
    """The rounds, from round 0, whose pages need not be taken back."""
    for number, (attempt, row) in enumerate(zip(told.attempts, chain, strict=False)):
        if attempt != row.attempt:
            return number
    return min(len(told.attempts), len(chain))


def settled(rows: Sequence[RoundRow], ended: bool) -> list[RoundRow]:
    """The published rounds of which nothing more will be known: they were scored, or the run has gone on."""
    chain = published(rows)
    if chain and not (ended or chain[-1].scored or rows[-1].round > chain[-1].round):
        return chain[:-1]
    return chain


def page(records: LedgerReader, row: RoundRow, rows: Sequence[RoundRow]) -> Page:
    """The page of a published round; `rows` are all attempts that were not rolled back."""
    at = row.closed_at or row.opened_at
    attempts = {other.attempt for other in rows if other.round == row.round}
    numbers = {"round/seconds": at - row.opened_at, "round/attempts": float(len(attempts))}
    numbers["round/degraded"] = float(row.complete is False)
    numbers |= _sites(records, row) | _moved(records, row, attempts) | _scores(records, row)
    numbers |= {f"statistics/{name}": value for name, value in row.statistics.items()}
    return Page(row.round, row.attempt, at, numbers)


def _sites(records: LedgerReader, row: RoundRow) -> dict[str, float]:
    statuses = [
        task.task_status for task in records.tasks(row.run, row.round, row.attempt) if task.kind is not TaskKind.SCORE
    ]
    count = Counter(statuses)
    found = {
        "invited": len(statuses),
        "reported": count["reported"] + count["set-aside"],
        "set_aside": count["set-aside"],
    }
    found |= {"late": count["late"], "failed": count["failed"]}
    return {f"sites/{name}": float(number) for name, number in found.items()}


def _moved(records: LedgerReader, row: RoundRow, attempts: set[int]) -> dict[str, float]:
    """Of all attempts at the round, as `LedgerReader.moved` counts."""
    updates = [update for update in records.updates(row.run, row.round) if update.task.attempt in attempts]
    tasks = [task for task in records.tasks(row.run, row.round) if task.attempt in attempts]
    received = sum(update.bytes for update in updates if update.verdict is Verdict.ACCEPTED)
    sent = sum(task.base_bytes for task in tasks if task.kind is TaskKind.FIT)
    return {"transfer/received_mb": received / MB, "transfer/sent_mb": sent / MB}


def _scores(records: LedgerReader, row: RoundRow) -> dict[str, float]:
    """Over sites; recalls of single classes have a group of their own."""
    found: dict[str, float] = {}
    for name, spread in spreads(records.scores(row.run, row.round).get(row.round, {})).items():
        group = "scores" if score_family(name) == name else "classes"
        found |= {f"{group}/{name}/{stat}": getattr(spread, stat) for stat in ("mean", "std", "worst")}
    return found
