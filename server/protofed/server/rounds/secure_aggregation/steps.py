"""Asks sites for the steps of a run's secure sums, and says what their uploads must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import (
    DiskFailureError,
    FailureReason,
    OutOfSpaceError,
    SecureSumError,
    StateError,
)
from protofed.common.failpoint import reach
from protofed.common.payload import Payload, SiteId
from protofed.common.protocol.messages import Subject, TaskKind
from protofed.common.secure_aggregation import score_sums
from protofed.common.secure_aggregation.groups import Groups
from protofed.common.secure_aggregation.linear_form import SumLayout
from protofed.common.statistics import Spread
from protofed.server.method import ServerMethod
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.invitations import Invitations
from protofed.server.rounds.machine import phases
from protofed.server.rounds.machine.rules import Grouping, left_out
from protofed.server.rounds.secure_aggregation.record import BEGINNINGS, SumCheck, SumRecord, context_of, length_of
from protofed.server.rounds.secure_aggregation.totals import holders_of, layout_of, score_names
from protofed.server.storage.rows import TaskRow, UpdateRow
from protofed.server.verdicts import SetAside, SetAsideCode

log = structlog.get_logger()
MOST_DOUBLED = 1 << 20  # more attempts than any round had; a task has 32 bits for the number


class SumRounds:
    """The secure sums of one run; all methods but `prepared` are called from the coordinator's thread."""

    def __init__(self, recipe: Recipe, method: ServerMethod, context: ServerContext, invitations: Invitations) -> None:
        self._run, self._recipe, self._method = recipe.name, recipe.fingerprint(), method
        self.holders = holders_of(method, recipe)
        self._grouping = Grouping(recipe.name, recipe.seed, recipe.federation.sum_group)
        self.scores = score_names(recipe)
        self._ledger, self._blobs, self._clock = context.ledger, context.blobs, context.clock
        self._invitations = invitations
        self._layout: tuple[Digest, SumLayout] | None = None  # of the newest state, by its address
        self._record: tuple[tuple[int, int, Subject, TaskKind], SumRecord] | None = None  # of which step
        self._checks: dict[str, SumCheck] = {}  # by task_id, of the step that is open

    def ask(self, phase: phases.Summing, *, complete: bool) -> tuple[phases.Insufficient, ...]:
        """Store what each site is sent, record the tasks with the end of the last step's, wake the sites.

        Args:
            complete: the round needs none of the updates that are not there yet.

        Returns:
            The event that what sites have sent gives nothing to go on with; nothing: they are asked.

        Raises:
            OutOfSpaceError, DiskFailureError: something cannot be written; no site is asked.
        """
        try:
            self._ask(phase, complete=complete)
        except (OutOfSpaceError, DiskFailureError):
            raise
        except (SecureSumError, StateError) as error:  # of a site that lied, or of a blob that is damaged
            log.error("no secure sum", run=self._run, round=phase.round, kind=phase.step, why=str(error))
            return (phases.Insufficient(f"{phase.step} of the secure sum: {error}", self._clock()),)
        return ()

    def _ask(self, phase: phases.Summing, *, complete: bool) -> None:
        at = phase.round, phase.attempt
        reach("sum-step-closed")
        log.info("secure sum goes on", run=self._run, round=phase.round, kind=phase.step, cohort=sorted(phase.cohort))
        rows = [row for row in self._ledger.updates(self._run, *at) if row.task.subject is phase.subject]
        self._checks = {}
        record = self._recorded(rows, phase.groups, phase.subject)
        self._record = (*at, phase.subject, phase.step), record
        sites = sorted(phase.cohort)
        bases = self._stored(record.bases(phase.step, sites))
        status, silent = "not-needed" if complete else "late", self._invitations.clear()
        self._invitations.send(
            phase.step,
            *at,
            sites,
            bases,
            lambda tasks: self._ledger.go_on(tasks, status, silent, phase.groups),
            phase.subject,
        )
        if phase.step is TaskKind.SHARE:
            try:
                self._set_aside(rows, phase)
            except OutOfSpaceError as error:  # the step is asked for; the aggregation sets aside who is not in the sum
                log.warning("no space to set updates aside", run=self._run, round=phase.round, why=str(error))
        reach("sum-step-asked")

    def attempt_after(self, round: int, last: int) -> int:
        """The number of the attempt at a round after this one; 0: there was none.

        A site takes part in no attempt twice, and declines by its policy one that it knows to be over: then this
        ledger is a copy from before it. Doubled, the number is soon above all that sites know. It ends to be:
        a site may decline for another reason, such as a limit a day, as often as the recipe allows attempts.
        """
        declined = 0 < last < MOST_DOUBLED and any(
            task.reason == FailureReason.POLICY for task in self._ledger.tasks(self._run, round, last)
        )
        return 2 * last if declined else 1 + last

    def length(self, task: TaskRow, address: Digest, state: Payload) -> int | None:
        """The length of the masked vector that answers a task on top of this state; None: there is none."""
        if task.subject is Subject.SCORES:
            layout = score_sums.layout_of(self.scores)
            return length_of(task.kind, layout.size, layout.classes)
        if self._layout is None or self._layout[0] != address:
            self._layout = address, layout_of(self._method, state)
        layout = self._layout[1]
        return length_of(task.kind, layout.size, layout.classes)

    def prepare(self, task: TaskRow) -> None:
        """Read what the upload that answers an open task is examined by."""
        assert task.subject is not None  # noqa: S101  (of a sum)
        if task.kind in BEGINNINGS:
            context = context_of(task, self._recipe, holders=self._counts_holders(task.subject))
            self._checks[task.task_id] = SumCheck(task.kind, task.site, context, None)
            return
        at = task.round, task.attempt, task.subject, task.kind
        if self._record is None or self._record[0] != at:  # after a restart
            rows = self._ledger.updates(self._run, task.round, task.attempt)
            self._record = at, self._recorded(rows, self._begun(rows), task.subject)
        record = self._record[1]
        self._checks[task.task_id] = SumCheck(task.kind, task.site, record.context, record)

    def prepared(self, task_id: str) -> SumCheck | None:
        """What `prepare` read; None: the step is over. May be called from any thread."""
        return self._checks.get(task_id)

    def opened_scores(self, round: int, attempt: int) -> dict[str, Spread]:
        """What the sum of the sites' own scores says, of which all steps are over.

        Raises:
            SecureSumError: what sites sent does not open it.
            StateError: an upload can no longer be read.
        """
        rows = self._ledger.updates(self._run, round, attempt)
        record = self._recorded(rows, self._begun(rows), Subject.SCORES)
        return score_sums.opened(self.scores, record.total())

    def _counts_holders(self, subject: Subject) -> bool:
        return subject is Subject.SCORES or self.holders

    def _recorded(self, rows: Sequence[UpdateRow], groups: Groups, subject: Subject) -> SumRecord:
        holders = self._counts_holders(subject)
        return SumRecord.of(rows, self._recipe, self._blobs.view, groups, holders=holders, subject=subject)

    def _begun(self, rows: Sequence[UpdateRow]) -> Groups:
        """The groups of a sum that has begun; none is dissolved meanwhile."""
        return self._grouping.begun(self._ledger.groups(), {row.task.site for row in rows})

    def _set_aside(self, rows: Sequence[UpdateRow], phase: phases.Summing) -> None:
        """Say of sites that are not in the sum what they wait for; after its tasks, whose groups are without them."""
        ready = [row for row in rows if row.counts]
        reasons = left_out(self._ledger.groups(), {row.task.site for row in ready}, self._grouping.fewest)
        for row in ready:
            if row.task.site not in phase.roster:
                self._ledger.set_aside(row, SetAside(SetAsideCode.GROUP, reasons[row.task.site]))

    def _stored(self, payloads: Mapping[SiteId, Payload]) -> dict[SiteId, tuple[Digest, int]]:
        """Digest and bytes by site; what is the same object for all is stored once."""
        stored: dict[int, tuple[Digest, int]] = {}
        for payload in payloads.values():
            if id(payload) not in stored:
                pieces = codec.encoded(payload)
                stored[id(payload)] = self._blobs.put(*pieces), sum(map(len, pieces))
        return {site: stored[id(payload)] for site, payload in payloads.items()}
