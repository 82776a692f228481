"""Verdicts: which invitation an update answers, and whether it counts. Every verdict is a ledger row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import structlog

from protofed.common.codec import Digest
from protofed.common.errors import ProtocolError
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import Manifest, Receipt, TaskKind, Verdict
from protofed.server.method import ExpectedUpdate
from protofed.server.metrics import ServerMetrics
from protofed.server.rounds import screening
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.rows import TaskRow, UpdateRow
from protofed.server.verdicts import RejectionCode, UpdateProblem

log = structlog.get_logger()


@dataclass(frozen=True)
class UploadIntake:
    """The gate of one run's updates."""

    ledger: Ledger
    run: str
    classes: int
    metrics: ServerMetrics = field(default_factory=ServerMetrics)

    def invitation(self, current: TaskRow | None, site: SiteId, task_id: str, *kinds: TaskKind) -> TaskRow:
        """The invitation that a site's call answers; the ledger is asked if it is not the site's `current` one.

        Raises:
            ProtocolError: there is none, or it is another site's, run's or kind of task's.
        """
        row = current if current is not None and current.task_id == task_id else self.ledger.task(task_id)
        if row is None or row.site != site or row.run != self.run or row.kind not in kinds:
            raise ProtocolError("no such task for this site; ask for the next task")
        return row

    def settled(self, row: TaskRow, manifest: Manifest, *, is_open: bool, complete: bool | None) -> Receipt | None:
        """The verdict that stands without looking at the update; None while the invitation is open.

        An invitation is closed by the update that counts, so an open one has none.

        Args:
            complete: whether the round had all that it wanted, if it is being aggregated now.
        """
        if is_open:
            return None
        self.ledger.settle_promises()
        if (counted := self.ledger.accepted(row)) is not None:
            if counted.digest == manifest.digest:
                self.metrics.judged(Verdict.DUPLICATE)
                return replace(counted.receipt(), verdict=Verdict.DUPLICATE)
            log.error("equivocation", run=self.run, round=row.round, site=row.site, digest=manifest.digest)
            return self.invalid(
                row,
                manifest,
                UpdateProblem(RejectionCode.EQUIVOCATION, "another update was already accepted for this task"),
            )
        if row.fate == "not-needed" or complete:
            return self.judge(row, Verdict.NOT_NEEDED, manifest, f"round {row.round} had all the updates it needed")
        return self.judge(row, Verdict.STALE, manifest, f"round {row.round} is closed")

    def announced(
        self, row: TaskRow, base: Digest | None, manifest: Manifest, expected: ExpectedUpdate
    ) -> Receipt | None:
        """INVALID if an announced upload cannot be accepted; None: send it."""
        fault = screening.size_fault(manifest) or screening.base_fault(base, row.base_digest)
        if fault is None and row.kind is TaskKind.INITIALISE:
            fault = screening.first_model_fault(manifest, self.classes)
        elif fault is None:
            fault = screening.manifest_fault(manifest, expected)
        return self.invalid(row, manifest, fault) if fault else None

    def invalid(self, row: TaskRow, manifest: Manifest, fault: UpdateProblem) -> Receipt:
        """Write down a refusal."""
        return self.judge(row, Verdict.INVALID, manifest, fault.text, fault.code)

    def judge(
        self,
        row: TaskRow,
        verdict: Verdict,
        manifest: Manifest,
        reason: str = "",
        code: str = "",
        metrics: Mapping[str, float] | None = None,
        weight: float | None = None,
        norm: float | None = None,
    ) -> Receipt:
        """Write a verdict down; the receipt is durable when this returns."""
        if verdict is not Verdict.ACCEPTED:
            log.warning(
                "update refused", run=self.run, round=row.round, site=row.site, verdict=verdict.value, reason=reason
            )
        else:
            log.info("update accepted", run=self.run, round=row.round, site=row.site, update_bytes=manifest.total_bytes)
        update = UpdateRow(
            row, verdict, reason, manifest.digest, manifest.total_bytes, metrics or {}, weight, code, norm
        )
        receipt = self.ledger.judge(update)
        self.metrics.judged(verdict, code)
        if verdict is Verdict.ACCEPTED and row.kind is TaskKind.FIT and norm is not None:
            self.metrics.moved_model(norm)
        return receipt
