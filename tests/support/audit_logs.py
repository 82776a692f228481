"""Audit logs of sites for tests: in memory, to be looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protofed.client.transport.audit import ClientAudit


@dataclass
class MemoryAuditLog:
    """Lines in memory.

    Attributes:
        failing: raised, one after the other, by the next writes.
    """

    lines: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    failing: list[Exception] = field(default_factory=list)
    writes: int = 0

    def append_all(self, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self.writes += 1
        if self.failing:
            raise self.failing.pop(0)
        self.lines += [(event, dict(facts)) for event, facts in entries]

    def of(self, event: str) -> list[dict[str, Any]]:
        """The facts of all lines of an event."""
        return [facts for name, facts in self.lines if name == event]


def audit() -> ClientAudit:
    return ClientAudit(MemoryAuditLog())
