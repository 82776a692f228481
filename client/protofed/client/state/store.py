"""What a site keeps from round to round, and what it keeps it in."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Protocol

from protofed.client.privacy.approval import Approvals
from protofed.client.privacy.site_secret import BYTES
from protofed.common.payload import Payload, Update
from protofed.common.protocol.messages import Receipt, Task, Verdict

COUNTED = (Verdict.ACCEPTED, Verdict.DUPLICATE)


@dataclass(frozen=True)
class SiteState:
    """What a site holds after the last round that counted (0: none yet)."""

    round: int = 0
    memory: Payload = field(default_factory=dict)
    personal: Payload | None = None


@dataclass(frozen=True)
class FitOutcome:
    """What a fit gave: an update for the server, and what the site keeps if it counts.

    Attributes:
        received: what of the base the gate looks at again when the update is handed in late.
    """

    update: Update
    memory: Payload
    personal: Payload
    received: Payload = field(default_factory=dict)


class Store(Protocol):
    """A site's own storage.

    Attributes:
        approvals: of runs; None: the site cannot approve any.
    """

    @property
    def approvals(self) -> Approvals | None:
        """Of runs."""

    def secret(self) -> bytes:
        """Random bytes that only this site knows, always the same."""

    def received(self, task: Task) -> Payload:
        """What was staged as received with a fit that is not settled."""

    def held(self, run: str, before: int) -> SiteState:
        """What counted in the newest round before this one."""

    def unsettled(self, run: str) -> list[tuple[Task, Update]]:
        """Updates that were computed but have no receipt yet: the daemon or its connection died in between."""

    def stage(self, task: Task, outcome: FitOutcome) -> None:
        """Keep a fit's outcome, durably, before it is pushed."""

    def settle(self, task: Task, receipt: Receipt) -> None:
        """Keep the receipt: the outcome counts from now on, or is forgotten."""

    def settled(self, run: str) -> frozenset[str]:
        """The task_ids of the tasks whose outcomes count, as far as they are kept."""

    def retain(self, rounds: int) -> None:
        """Keep what the run may be rolled back to: so many rounds behind the newest that counts; 0: all."""


class MemoryStore:
    """A site of a simulation.

    Args:
        secret: so that a simulation can be repeated; else random.
    """

    approvals: Approvals | None = None

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or secrets.token_bytes(BYTES)
        self._held: dict[str, SiteState] = {}
        self._staged: dict[str, tuple[Task, FitOutcome]] = {}

    def secret(self) -> bytes:
        """As it was given."""
        return self._secret

    def received(self, task: Task) -> Payload:
        """As it was staged."""
        return self._staged[task.task_id][1].received

    def held(self, run: str, before: int) -> SiteState:
        """What counted last."""
        held = self._held.get(run, SiteState())
        return held if held.round < before else SiteState()

    def unsettled(self, run: str) -> list[tuple[Task, Update]]:
        """Updates without a receipt."""
        return [(task, outcome.update) for task, outcome in self._staged.values() if task.run == run]

    def stage(self, task: Task, outcome: FitOutcome) -> None:
        """Keep a fit's outcome."""
        self._staged[task.task_id] = (task, outcome)

    def settle(self, task: Task, receipt: Receipt) -> None:
        """Count the outcome, or forget it."""
        _, outcome = self._staged.pop(task.task_id)
        if receipt.verdict in COUNTED:
            self._held[task.run] = SiteState(task.round, outcome.memory, outcome.personal)

    def settled(self, run: str) -> frozenset[str]:
        """None: what an old task would do here is lost with the process anyway."""
        return frozenset()

    def retain(self, rounds: int) -> None:
        """Only the newest round is kept: simulations are not rolled back."""
