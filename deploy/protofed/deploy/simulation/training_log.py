"""How much each site of a simulation has trained: no real site tells that, and the simulation keeps it to itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protofed.client.site import PreparedRun, train_alone
from protofed.client.training.context import FitContext
from protofed.common.payload import Payload, SiteId, Update
from protofed.common.protocol.messages import Task
from protofed.common.storage.journal import Journal, records

FILE = "trained.jsonl"  # of a simulation's state folder
_FIT = "fit"


class TrainingLog:
    """Examples that sites have trained on, repetitions counted, by task: whatever calls of `train` their method makes.

    A fit that was interrupted and began again is counted once, as the one whose update counts.

    Args:
        file: keeps them for a simulation that goes on later; None: in memory.

    Raises:
        StateError: the file is not what was written.
    """

    def __init__(self, file: Path | None) -> None:
        self._journal = None if file is None else Journal(file)  # first: it removes half a line
        kept = () if file is None else (record.facts for record in records(file) if record.event == _FIT)
        self._examples: dict[tuple[int, SiteId, str], int] = dict(map(_entry, kept))

    def note(self, task: Task, site: SiteId, examples: int) -> None:
        """A fit has ended; called before its update is kept, so that none that counts is missing here."""
        self._examples[task.round, site, task.task_id] = examples
        if self._journal is not None:
            self._journal.append(_FIT, round=task.round, site=site, task=task.task_id, examples=examples)

    def by_round(self) -> dict[int, dict[SiteId, int]]:
        """Examples by round, all of its attempts together, and site."""
        found: dict[int, dict[SiteId, int]] = {}
        for (number, site, _), examples in sorted(self._examples.items()):
            of_round = found.setdefault(number, {})
            of_round[site] = of_round.get(site, 0) + examples
        return found

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
