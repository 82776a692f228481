"""Rows of the ledger as the rest of the server sees them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from protofed.common.codec import Digest
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import TRAININGS, Receipt, SumOf, TaskKind, Verdict
from protofed.server.verdicts import RoundOutcome

OPEN = ("invited", "started")  # statuses of invitations that a site may still answer


@dataclass(frozen=True)
class TaskRow:
    """One invitation and what became of it; `sum_of` says what a secure aggregation is over.

    `task_status`: invited, started, reported, failed (the site said so), late, not-needed, or rejected (the site
    reported, and its update was rejected). `reason` explains the last four.
    """

    task_id: str
    run: str
    round: int
    attempt: int
    site: SiteId
    kind: TaskKind
    base_digest: Digest | None
    base_bytes: int
    task_status: str = "invited"
    reason: str = ""
    sum_of: SumOf | None = None

    @property
    def asks_for_update(self) -> bool:
        """Whether a round asks its sites for what they computed: one such task a site and attempt, sum or not."""
        return self.kind in (TaskKind.INITIALISE, TaskKind.FIT)

    @property
    def label(self) -> str:
        """Its kind as records show it: a sum of scores has the steps of one of updates, in the same attempt."""
        of_scores = self.sum_of is SumOf.SCORES and self.kind is not TaskKind.SCORE_SUM
        return f"score-{self.kind}" if of_scores else self.kind

    @property
    def bytes_sent(self) -> int:
        """Bytes that the site is asked to fetch to train, to sum what it trained, and to refine."""
        return self.base_bytes if self.kind in TRAININGS or self.sum_of is SumOf.UPDATE else 0

    @property
    def is_open(self) -> bool:
        """Whether the site may still answer."""
        return self.task_status in OPEN


@dataclass(frozen=True)
class UpdateRow:
    """One commit and its verdict.

    Attributes:
        code: of a refusal, which `reason` explains, or of what `rejected` explains.
        norm: Euclidean, of the update less the model that it starts from; None where it was not taken.
        rejected: why an accepted update was left out of the aggregation; None: it was not.
    """

    task: TaskRow
    verdict: Verdict
    reason: str
    digest: Digest
    bytes: int
    metrics: Mapping[str, float]
    weight: float | None
    code: str = ""
    norm: float | None = None
    rejected: str | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether the site has a receipt for it."""
        return self.verdict is Verdict.ACCEPTED

    @property
    def counts(self) -> bool:
        """Whether the aggregation uses it."""
        return self.is_accepted and self.rejected is None

    def receipt(self) -> Receipt:
        """The receipt of this row; its record_hash commits the server to the whole row."""
        facts = [
            self.task.run,
            self.task.round,
            self.task.site,
            self.task.task_id,
            self.verdict,
            self.reason,
            self.digest,
        ]
        return Receipt(self.verdict, self.reason, self.digest, blake3(json.dumps(facts).encode()).hexdigest())


def one_a_site(rows: Iterable[UpdateRow]) -> list[UpdateRow]:
    """Of the commits of one attempt, one for each site whose update the state is made of.

    Under secure aggregation its first commit says that it has trained; its update is in the sum if it sent it masked.
    """
    counted = [row for row in rows if row.counts]
    masked = {row.task.site for row in counted if row.task.kind is TaskKind.MASK and row.task.sum_of is SumOf.UPDATE}
    return [row for row in counted if row.task.asks_for_update and (row.task.sum_of is None or row.task.site in masked)]


@dataclass(frozen=True)
class RoundRow:
    """One attempt at a round.

    Attributes:
        state: digest of the state that it published.
        aggregate: digest of what an evaluator refines to that state; None: nobody does, or it is not there yet.
        complete: it used every update that it wanted.
        abandoned: why, if it was.
        aggregations: times that its aggregation was started.
        rolled_back: the run went back to an earlier round afterwards.
        statistics: what its state says of itself in numbers; see `rounds.aggregation.publisher`.
        enrolled: N of methods: trainers that the run could invite when it was opened.
    """

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
    aggregations: int = 0
    rolled_back: bool = False
    statistics: Mapping[str, float] = field(default_factory=dict)
    enrolled: int = 0
    aggregate: Digest | None = None


@dataclass(frozen=True)
class CertificateRow:
    """One certificate that was registered; `party` is site or operator, times are seconds of the Unix epoch.

    Attributes:
        revoked_at: None: it was not; `reason` says why it was.
        roles: granted by the registration; `common.protocol.roles` has them.
    """

    fingerprint: str
    party: str
    name: str
    not_before: float
    not_after: float
    added_at: float
    revoked_at: float | None = None
    reason: str | None = None
    roles: tuple[str, ...] = ()

    def status(self, now: float) -> str:
        """Valid, revoked, expired or not-yet-valid."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if now > self.not_after else "not-yet-valid" if now < self.not_before else "valid"


@dataclass(frozen=True)
class InterventionRow:
    """What an operator did to a run or a site.

    Attributes:
        at: seconds of the Unix epoch.
        action: aborted, paused, resumed, rolled-back, excluded, admitted, forgotten, regrouped, offered or revoked.
        operator: the name in the caller's certificate; empty in plain text, where callers are not known.
        run: the run that was named, or that was going on when a site was; None: none was.
        site: None: it was about the run.
    """

    at: float
    action: str
    operator: str
    run: str | None
    site: SiteId | None
    reason: str


@dataclass(frozen=True)
class RunRow:
    """One run; `ended_at` and `outcome` are None while it goes on, `position` is its place in the queue."""

    run: str
    fingerprint: Digest
    recipe: str
    position: int
    began_at: float
    ended_at: float | None
    outcome: RoundOutcome | None
    reason: str | None
    paused: bool

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than the recipe or the operator wanted."""
        return self.outcome is RoundOutcome.FAILED
