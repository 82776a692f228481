"""What became of every site's task in each of some rounds, as a table of words short enough for a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from protofed.deploy.operator.snapshot import FAILED
from protofed.deploy.report.rounds import TASK_STATUSES
from protofed.deploy.tables import printable
from protofed.protos.v1 import operator_pb2 as pb

WORDS: Final[Mapping[str, str]] = {
    "reported": "reported",
    "started": "works on it",
    "invited": "invited",
    "set-aside": "set aside",
    "failed": "failed",
    "late": "late",
    "not-needed": "not needed",
    "refused": "an update was refused",
}


@dataclass(frozen=True)
class Mark:
    """One site in one attempt; `status` is empty where it was not invited."""

    status: str
    reason: str

    @property
    def sign(self) -> str:
        """One character."""
        return sign(self.status)

    @property
    def word(self) -> str:
        """The status, and why, for who points at it and for screen readers."""
        return WORDS.get(self.status, self.status) + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Trouble:
    """A task that did not count, or an update that was refused."""

    round: int
    attempt: int
    site: str
    kind: str
    status: str
    reason: str


@dataclass(frozen=True)
class Calendar:
    """Rounds across, sites down.

    Attributes:
        rows: by site, a mark for each of `rounds`.
        legend: (sign, word) of the statuses that occur.
        troubles: newest first.
    """

    rounds: Sequence[pb.RoundInfo]
    rows: Mapping[str, Sequence[Mark]]
    legend: Sequence[tuple[str, str]]
    troubles: Sequence[Trouble]


def calendar(rounds: Sequence[pb.RoundInfo]) -> Calendar:
    """Of the tasks that train; what failed of the others, too, is among the troubles."""
    by_round = [{task.site: mark(task) for task in row.sites if task.kind in ("initialise", "fit")} for row in rounds]
    names = sorted({site for row in by_round for site in row})
    rows = {site: [row.get(site, Mark("", "")) for row in by_round] for site in names}
    found = {one.status for marks in rows.values() for one in marks}
    return Calendar(
        rounds, rows, [(sign(status), WORDS[status]) for status in WORDS if status in found], troubles(rounds)
    )


def sign(status: str) -> str:
    """The sign of a task's status, as a report has it; none where a site was not invited."""
    return TASK_STATUSES[status][0] if status in TASK_STATUSES else "?" if status else ""


def mark(task: pb.SiteTask) -> Mark:
    """A task's mark. A refused update does not fail its task: the site may send another."""
    reason = printable("; ".join([*([task.reason] if task.reason else []), *task.refusals]))
    refused = bool(task.refusals) and task.task_status in ("invited", "started")
    return Mark("refused" if refused else task.task_status, reason)


def troubles(rounds: Sequence[pb.RoundInfo]) -> list[Trouble]:
    """Tasks that failed, were late or set aside, and refused updates, newest first."""
    found = []
    for row in reversed(rounds):
        for task in row.sites:
            if task.task_status in FAILED:
                found.append(_trouble(row, task, task.task_status, task.reason))
            found += [_trouble(row, task, "refused", refusal) for refusal in task.refusals]
    return found


def _trouble(row: pb.RoundInfo, task: pb.SiteTask, status: str, reason: str) -> Trouble:
    return Trouble(row.round, row.attempt, task.site, task.kind, status, printable(reason))
