"""Rows of the ledger as the rest of the server sees them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from blake3 import blake3

from protofed.common.codec import Digest
from protofed.common.payload import SiteId
from protofed.common.task import Receipt, TaskKind, Verdict


@dataclass(frozen=True)
class TaskRow:
    """One invitation and what became of it (`fate`: invited, started, reported, failed, late, not-needed)."""

    nonce: str
    run: str
    round: int
    attempt: int
    site: SiteId
    kind: TaskKind
    base: Digest | None
    base_bytes: int
    fate: str = "invited"
    reason: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the site may still answer."""
        return self.fate in ("invited", "started")


@dataclass(frozen=True)
class UpdateRow:
    """One commit and its verdict."""

    task: TaskRow
    verdict: Verdict
    reason: str
    digest: Digest
    bytes: int
    metrics: Mapping[str, float]
    weight: float | None

    def receipt(self) -> Receipt:
        """The receipt of this row; its seal commits the server to all of it."""
        facts = [
            self.task.run,
            self.task.round,
            self.task.site,
            self.task.nonce,
            self.verdict,
            self.reason,
            self.digest,
        ]
        return Receipt(self.verdict, self.reason, self.digest, blake3(json.dumps(facts).encode()).hexdigest())


@dataclass(frozen=True)
class RoundRow:
    """One attempt at a round."""

    run: str
    round: int
    attempt: int
    size: int
    quorum: int
    state: Digest | None = None
    complete: bool | None = None
    abandoned: str | None = None
    scored: bool = False
    opened_at: float = 0.0
    closed_at: float | None = None


@dataclass(frozen=True)
class RunRow:
    """One run; `ended_at` is None while it goes on."""

    run: str
    fingerprint: Digest
    recipe: str
    began_at: float
    ended_at: float | None
    failed: bool | None
    reason: str | None
