"""What experiment trackers get of a run: the numbers of every finished round, from the ledger alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protofed.common.protocol.messages import TaskKind, score_family
from protofed.common.statistics import spreads
from protofed.server.operator.run_record import read_attempts
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow, RunRow

MB = 1e6


@dataclass(frozen=True)
class RoundMetrics:
    """The numbers of one round.

    Attributes:
        attempt: the one that published the round's state.
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
        "reported": count["reported"] + count["set-aside"],
        "set_aside": count["set-aside"],
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
