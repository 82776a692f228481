"""What a simulated site has in place of a daemon's: link, store under secure aggregation, and a log of its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from protofed.client.policy.policy import Released, ReleasedScores
from protofed.client.site import PreparedRun, train_alone
from protofed.client.state.store import COUNTED, Store
from protofed.client.training.context import FitContext
from protofed.common.payload import Payload, SiteId, Update
from protofed.common.protocol.messages import (
    PROTOCOL_VERSION,
    Assignment,
    Finished,
    PauseReason,
    Progress,
    Receipt,
    Role,
    Signal,
    Task,
    Verdict,
    Wait,
)
from protofed.common.storage.journal import Journal, records
from protofed.common.version import VERSION
from protofed.server.rounds.queue import RunQueue
from protofed.server.storage.blobs import Blobs
from protofed.server.storage.reader import LedgerReader
from protofed.server.verdicts import UpdateProblem

TRAINED = "trained.jsonl"  # of a simulation's state folder
_FIT = "fit"


@dataclass(frozen=True)
class DirectLink:
    """The link of a simulated site: function calls, through the codec and the intake of an upload; see `Link`."""

    runs: RunQueue
    blobs: Blobs
    site: SiteId
    roles: frozenset[Role]
    instance: str = "simulated"

    def enroll(self, pause_reason: PauseReason = PauseReason.NONE, wait_s: float = 0.0) -> Assignment | Finished:
        """Enroll the site."""
        return self.runs.enroll(self.site, self.instance, PROTOCOL_VERSION, VERSION, VERSION, self.roles, pause_reason)

    def next_task(self, run: str, wait_s: float) -> Task | Wait | Finished:
        """The site's next task. `wait_s` is ignored: in one process nothing arrives while it waits."""
        return self.runs.next_task(run, self.site, self.instance)

    def fetch(self, task: Task) -> bytes:
        """The bytes of the task's base model."""
        assert task.base_digest is not None  # noqa: S101  (the agent has asked)
        return self.blobs.get(task.base_digest)

    def push(self, task: Task, released: Released) -> Receipt:
        """Send an update; begin, examine and commit in the order of an upload over gRPC."""
        intake, manifest = self.runs.intake(task.run), released.manifest
        receipt = intake.begin(self.site, self.instance, task.task_id, task.round, task.base_digest, manifest)
        if receipt is not None:
            return receipt
        norm = intake.examine(self.site, task.task_id, manifest, released.data, task.base_digest)
        if isinstance(norm, UpdateProblem):
            return intake.refuse(self.site, task.task_id, manifest, norm)
        self.blobs.put(released.data)
        return intake.commit(self.site, self.instance, task.task_id, manifest, released.metrics, released.weight, norm)

    def report(self, task: Task, released: ReleasedScores) -> None:
        """Report scores."""
        self.runs.intake(task.run).report_scores(self.site, self.instance, task.task_id, released.scores)

    def beat(self, run: str, progress: Progress) -> Signal:
        """Report progress; simulated sites report only failures."""
        return self.runs.heartbeat(run, self.site, self.instance, progress)


def settled_when_aggregated(store: Store, ledger: LedgerReader) -> Store:
    """A site's store for a run under secure aggregation: an update counts once it is in a sum, as a daemon's does."""
    return cast("Store", _SumStore(store, lambda task: _is_aggregated(ledger, task)))


class _SumStore:
    """Settles what is known by now before anything else is asked of the store.

    A daemon sends its numbers when its group is known to be whole. A simulated site sends its update before, as without
    secure aggregation. If the update was rejected for its group, it must leave no trace on the site either.

    Args:
        is_aggregated: whether an update is in the sum of its round; None: that is not known yet.
    """

    def __init__(self, store: Store, is_aggregated: Callable[[Task], bool | None]) -> None:
        self._store, self._is_aggregated = store, is_aggregated
        self._waiting: dict[str, tuple[Task, Receipt]] = {}  # by task_id

    def settle(self, task: Task, receipt: Receipt) -> None:
        """See `Store.settle`."""
        if receipt.verdict in COUNTED:
            self._waiting[task.task_id] = task, receipt
        else:
            self._store.settle(task, receipt)

    def __getattr__(self, name: str) -> Any:
        for task, receipt in list(self._waiting.values()):
            if (aggregated := self._is_aggregated(task)) is not None:
                del self._waiting[task.task_id]
                self._store.settle(task, receipt if aggregated else replace(receipt, verdict=Verdict.LATE))
        return getattr(self._store, name)


def _is_aggregated(ledger: LedgerReader, task: Task) -> bool | None:
    row = ledger.task(task.task_id)
    assert row is not None  # noqa: S101  (the ledger gave the task)
    rounds = ledger.rounds(row.run, since=row.round)
    (attempt,) = (each for each in rounds if (each.round, each.attempt) == (row.round, row.attempt))
    if attempt.closed_at is None:
        return None
    update = ledger.accepted(row)
    return attempt.state is not None and update is not None and update.counts


class TrainingLog:
    """Examples that sites have trained on, repetitions counted, by task: whatever calls of `train` their method makes.

    No real site tells that, and the simulation keeps it to itself.

    A fit that was interrupted and began again is counted once, as the one whose update counts.

    Args:
        file: keeps them for a simulation that goes on later; None: in memory.

    Raises:
        StateError: the file is not what was written.
    """

    def __init__(self, file: Path | None) -> None:
        self._journal = None if file is None else Journal(file)  # first: it removes half a line
        facts = () if file is None else (record.facts for record in records(file) if record.event == _FIT)
        self._examples: dict[tuple[int, SiteId, str], int] = dict(map(_entry, facts))

    def note(self, task: Task, site: SiteId, examples: int) -> None:
        """A fit has ended; called before its update is kept, so that none that counts is missing here."""
        self._examples[task.round, site, task.task_id] = examples
        if self._journal is not None:
            self._journal.append(_FIT, round=task.round, site=site, task=task.task_id, examples=examples)

    def by_round(self) -> dict[int, dict[SiteId, int]]:
        """Examples by round, all of its attempts together, and site."""
        rounds: dict[int, dict[SiteId, int]] = {}
        for (number, site, _), examples in sorted(self._examples.items()):
            of_round = rounds.setdefault(number, {})
            of_round[site] = of_round.get(site, 0) + examples
        return rounds

    def close(self) -> None:
        """Release the file."""
        if self._journal is not None:
            self._journal.close()

    def fit(self, run: PreparedRun, task: Task, local: FitContext, base: Payload) -> Update:
        """`train_alone`, noted."""
        before = local.throughput.examples
        update = train_alone(run, task, local, base)
        self.note(task, local.site, local.throughput.examples - before)
        return update


def _entry(facts: Mapping[str, Any]) -> tuple[tuple[int, SiteId, str], int]:
    return (facts["round"], facts["site"], facts["task"]), facts["examples"]
