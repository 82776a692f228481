"""Performs a round's aggregation: chooses the updates, computes the new state, publishes it; retries on a full disk.

If a method has refinements, an evaluator refines the aggregate to the state that the round publishes. The state machine
decides which evaluator is asked, and how often. The aggregate, and what the evaluator fetches, are durable before. The
evaluator's upload takes the way of every update. The published state is made from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import structlog

from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import DiskFailureError, OutOfSpaceError, ProtofedError, SecureAggregationError, count
from protofed.common.failpoint import reach
from protofed.common.payload import Part, Payload, SiteId
from protofed.common.protocol.messages import TaskKind
from protofed.common.secure_aggregation.groups import Groups
from protofed.server.method import (
    NOTHING,
    ExpectedUpdate,
    RefiningServerMethod,
    RoundContext,
    ServerMethod,
    drop_private,
    refining,
)
from protofed.server.rounds.aggregation.publisher import (
    Opened,
    Published,
    Publisher,
    capped,
    disagreeing,
    outliers,
    refinement,
    weight_cap,
)
from protofed.server.rounds.context import ServerContext, round_context
from protofed.server.rounds.machine import advance, phases
from protofed.server.rounds.machine.rules import Grouping, left_out
from protofed.server.rounds.presence import Invitations
from protofed.server.rounds.scores.best_round import Rankings, prune
from protofed.server.storage.rows import RoundRow, UpdateRow
from protofed.server.verdicts import Rejection, RejectionCode

log = structlog.get_logger()
WEIGHT_CAP = "weight_cap"  # a round's statistic: `weight_cap`, in rounds of a method that weighs by example counts
PAUSE_S = 10.0  # before another attempt when the disk is full


@dataclass(frozen=True)
class Rejected:
    """What the run's robust rule leaves out, with reasons by site."""

    reasons: Mapping[SiteId, str]


# The new state, or reasons by site of a rejected or damaged update.
Result: TypeAlias = Published | Rejected | dict[SiteId, str] | Exception
# The new state, which is durable, or the event that says why there is none.
Outcome: TypeAlias = Published | phases.Insufficient | phases.Broken


@dataclass(frozen=True)
class AggregationJob:
    """One round's aggregation.

    Attributes:
        complete: the round got all its updates, by their number and by required sites.
        silent: by site that did not report, what is known about the site in words.
        aggregate: what an evaluator has refined; None: the sites' updates are to be aggregated.
        statistics: of the aggregation that gave it.
    """

    phase: phases.Aggregating
    complete: bool
    silent: dict[SiteId, str]
    aggregate: Payload | None = None
    statistics: Mapping[str, float] = field(default_factory=dict)


class Choice(NamedTuple):
    """Which of an attempt's accepted updates count.

    Attributes:
        excluded: by site, why its update does not.
        rejected: rejected by the robust rule; a process that died there may not have got to all.
        is_whole: no site's update was rejected.
    """

    used: list[UpdateRow]
    excluded: dict[SiteId, str]
    rejected: list[UpdateRow]
    is_whole: bool


@dataclass(frozen=True)
class Computed:
    """The event that a job's computation is over.

    Attributes:
        used: the updates that it was of.
        complete: the round got all its updates, and used them.
    """

    job: AggregationJob
    used: Sequence[UpdateRow]
    complete: bool
    result: Result


class Aggregation:
    """Aggregates the rounds of one run, one at a time.

    `begin`, `retry` and `settled` give the outcome; None: it is being computed, or waits for space on the disk.

    Args:
        rankings: of the run's rounds, by a score's name: the best one is kept longer.
        queue: takes the event that a computation is over, on the coordinator's thread; `settled` answers it.
    """

    def __init__(
        self,
        recipe: Recipe,
        publisher: Publisher,
        context: ServerContext,
        rankings: Rankings,
        queue: Callable[[Computed], None],
    ) -> None:
        self._recipe = recipe
        self._run, self._rules, self._grouping = recipe.name, recipe.federation, Grouping.of_run(recipe)
        self._publisher, self._rankings = publisher, rankings
        self._context, self._ledger, self._queue = context, context.ledger, queue
        self._job: AggregationJob | None = None
        self._row: RoundRow | None = None  # the attempt's, once the ledger has it that its aggregation begins
        self._chosen = False  # whether this process has rejected what the robust rule rejects of this job's updates
        self._again_at: float | None = None  # waiting for space

    @property
    def job(self) -> AggregationJob | None:
        """The job that is being computed or waits for space on the disk."""
        return self._job

    @property
    def waits_for_space(self) -> bool:
        """Whether nothing is being computed because the disk is full."""
        return self._again_at is not None

    def begin(self, job: AggregationJob, state: Payload | None) -> Outcome | None:
        """Aggregate a round's updates on top of a state; None: the first model."""
        self._job, self._row, self._chosen = job, None, False
        return self._aggregate(state)

    def retry(self, state: Payload | None) -> Outcome | None:
        """Begin again, if a job waits for space and its pause is over."""
        if self._again_at is None or self._context.clock() < self._again_at:
            return None
        self._again_at = None
        return self._aggregate(state)

    def drop(self) -> None:
        """Forget a job that waits for space: the run goes back to an earlier round."""
        self._job, self._again_at = None, None

    def _aggregate(self, state: Payload | None) -> Outcome | None:
        job = self._job
        assert job is not None  # noqa: S101  (started)
        phase = job.phase
        groups: Groups = ()
        try:
            row = self._record_start(phase)
            if self._grouping is not None:
                groups = self._ledger.groups()
            chosen = self._choose(phase, groups)
        except OutOfSpaceError as error:
            self._wait(error)
            return None
        if (deaths := row.aggregations - 1) >= self._rules.max_attempts:  # a restart would die in it again, for ever
            reason = f"the server died {deaths} times while it aggregated round {phase.round}"
            return self._end(phases.Broken(f"{reason}; it may need more memory"))
        if (problem := self._too_few(phase, chosen)) is not None:
            return self._end(phases.Insufficient(problem, self._context.clock()))
        used = chosen.used
        if self._grouping is not None:
            groups = self._grouping.started(groups, {update.task.site for update in used})
        of_round = round_context(self._recipe, row.round, row.enrolled)
        before = None if self._chosen or phase.refines else chosen.rejected
        complete = job.complete and chosen.is_whole
        self._context.work(
            lambda: self._computed(job, state, used, groups, of_round, before),
            lambda result: self._queue(Computed(job, used, complete, result)),
        )
        return None

    def _record_start(self, phase: phases.Aggregating) -> RoundRow:
        """Record in the ledger that the aggregation begins, once until it waits; the attempt's row then."""
        if self._row is None:
            self._row = self._ledger.count_aggregation(self._run, phase.round, phase.attempt)
        return self._row

    def _survived(self) -> None:
        """Take the start back: whatever ends this process now, this aggregation does not; if it can be recorded."""
        if self._job is None or self._row is None:
            return
        phase = self._job.phase
        with suppress(OutOfSpaceError, DiskFailureError):
            self._ledger.count_aggregation(self._run, phase.round, phase.attempt, by=-1)
            self._row = None

    def _wait(self, error: OutOfSpaceError) -> None:
        """No outcome yet: the job is started again later."""
        job = self._job
        at = {} if job is None else {"round": job.phase.round}
        log.error("no space for the new state; trying again", run=self._run, **at, in_s=PAUSE_S, why=str(error))
        self._survived()
        self._again_at = self._context.clock() + PAUSE_S

    def _too_few(self, phase: phases.Aggregating, chosen: Choice) -> str | None:
        """Why the updates that are left do not do; None: they do."""
        fewest = self._publisher.needed if phase.round and not phase.refines else 1
        # What a rule rejects did come, and the rule asks for so many that it may.
        arrived = frozenset(row.task.site for row in [*chosen.used, *chosen.rejected])
        if not phase.is_short(arrived) and len(arrived) >= fewest:
            return None
        reasons = "; ".join(f"{site}: {reason}" for site, reason in chosen.excluded.items())
        missing = advance.missing(phase.required & chosen.excluded.keys())
        return f"{count(len(chosen.used), 'update')} left, quorum {max(phase.quorum, fewest)} ({reasons}){missing}"

    def _choose(self, phase: phases.Aggregating, groups: Groups) -> Choice:
        """A function of the ledger's rows alone: a restarted server uses the same updates."""
        updates = self._ledger.updates(self._run, phase.round, phase.attempt)
        accepted = [row for row in updates if row.is_accepted]
        if phase.refines:
            is_whole = all(row.counts or row.task.kind is TaskKind.REFINE for row in accepted)
            return Choice(*refinement(accepted), [], is_whole)
        code, unusable = self._unusable(phase, accepted, groups)
        for row in accepted:
            if row.counts and row.task.site in unusable:
                self._reject(row, Rejection(code, unusable[row.task.site]))
        excluded = {row.task.site: row.rejected for row in accepted if row.rejected is not None} | unusable
        used = [row for row in accepted if row.task.site not in excluded]
        rejected = [row for row in accepted if row.code == RejectionCode.ROBUST]
        return Choice(used, excluded, rejected, not excluded)

    def _unusable(
        self, phase: phases.Aggregating, accepted: Sequence[UpdateRow], groups: Groups
    ) -> tuple[RejectionCode, dict[SiteId, str]]:
        """The sites whose updates are rejected before the aggregation, with reasons."""
        if not phase.round:
            models = {row.task.site: row.digest for row in accepted if row.counts}
            return RejectionCode.FIRST_MODEL, disagreeing(models, phase.quorum)
        if self._rules.secure:
            began = {row.task.site for row in accepted if row.task.asks_for_update and row.counts}
            return RejectionCode.GROUP, left_out(groups, began, self._rules.sum_group)
        norms = {row.task.site: row.norm for row in accepted if row.norm is not None}
        return RejectionCode.OUTLIER, outliers(norms, self._rules.outlier_factor)

    def _computed(
        self,
        job: AggregationJob,
        state: Payload | None,
        used: list[UpdateRow],
        groups: Groups,
        context: RoundContext,
        before: list[UpdateRow] | None,
    ) -> Result:
        """Called on the worker thread, so it touches no ledger: that belongs to the coordinator's thread.

        Args:
            before: updates that the robust rule has rejected; with them it rejects the same again. None: it is done.
        """
        try:
            reach("aggregation-started")
            if job.aggregate is not None:
                new, statistics = self._publisher.refined(job.aggregate, used[0], context), job.statistics
            elif isinstance(outcome := self._aggregated(state, used, groups, context, before), Rejected):
                return outcome
            else:
                new, statistics = outcome
            reach("aggregation-done")
            published = self._publisher.publish(new, state)
            self._publisher.uncache(used)
            return replace(published, statistics={**statistics, **published.statistics})
        except OutOfSpaceError as error:
            return error
        except SecureAggregationError as error:  # of what a site sent: the round's reason says it
            return self._publisher.damaged(used) or error
        except Exception as error:
            # Whatever broke: if blobs are damaged, the round goes on without them; otherwise the run ends by name.
            if damaged := self._publisher.damaged(used):
                return damaged
            log.exception("aggregation failed", run=self._run, round=job.phase.round)
            return error

    def _aggregated(
        self,
        state: Payload | None,
        used: list[UpdateRow],
        groups: Groups,
        context: RoundContext,
        before: list[UpdateRow] | None,
    ) -> Rejected | tuple[Payload, Mapping[str, float]]:
        """What the robust rule rejects, if it does; else the next state and statistics; args as of `_computed`.

        A blob is checked once, also where the rule reads it before the method does.
        """
        opened: Opened = {}
        if before is not None and self._publisher.chooses(state):
            damaged = self._publisher.damaged(before)
            there = [*used, *(row for row in before if row.task.site not in damaged)]
            opened, in_use = self._publisher.opened(there), {row.task.site for row in used}
            reasons = self._publisher.rejected(state, there, opened)
            if rejected := {site: why for site, why in reasons.items() if site in in_use}:
                return Rejected(rejected)
        most = weight_cap(used, self._rules.max_weight_ratio) if self._publisher.weighs(state) else math.inf
        counted = [self._capped(row, most) for row in used]
        new, statistics = self._publisher.aggregate(state, counted, context, groups, opened)
        return new, {**statistics, WEIGHT_CAP: most} if most < math.inf else statistics

    def _capped(self, row: UpdateRow, most: float) -> UpdateRow:
        if (counted := capped(row, most)) is not row:
            log.warning(
                "example count capped",
                run=self._run,
                round=row.task.round,
                site=row.task.site,
                claimed=row.weight,
                counted=counted.weight,
            )
        return counted

    def settled(self, computed: Computed, state: Payload | None) -> Outcome | None:
        """Record what a computation gave; with fewer updates it begins again, on top of the same state."""
        job, used, result = computed.job, computed.used, computed.result
        if self._job is not job:  # the operator ended the run while it was computed
            return None
        try:
            match result:
                case Published():
                    self._publish(job, result, complete=computed.complete)
                    return self._end(result)
                case OutOfSpaceError():
                    raise result
                case SecureAggregationError():
                    why = f"the secure aggregation cannot be opened: {result}"
                    return self._end(phases.Insufficient(why, self._context.clock()))
                case dict() if any(row.task.sum_of is not None for row in used):
                    reasons = "; ".join(f"{site}: {reason}" for site, reason in result.items())
                    why = f"the secure aggregation is damaged ({reasons})"
                    return self._end(phases.Insufficient(why, self._context.clock()))
                case Rejected(by_site) | dict(by_site):
                    self._chosen = self._leave_out(used, by_site, by_rule=isinstance(result, Rejected))
                case DiskFailureError():
                    self._survived()
                    raise result  # the server ends; another one, with a sound disk, aggregates
                case _:
                    cause = str(result) if isinstance(result, ProtofedError) else type(result).__name__
                    return self._end(phases.Broken(f"round {job.phase.round} could not be aggregated: {cause}"))
        except OutOfSpaceError as error:  # the same follows again
            self._wait(error)
            return None
        return self._aggregate(state)

    def _leave_out(self, used: Sequence[UpdateRow], reasons: Mapping[SiteId, str], *, by_rule: bool) -> bool:
        """Set updates aside; whether the robust rule has: it does not choose again of fewer."""
        code = RejectionCode.ROBUST if by_rule else RejectionCode.UNREADABLE
        for row in used:
            if row.task.site in reasons:
                self._reject(row, Rejection(code, reasons[row.task.site]))
        return by_rule

    def _reject(self, row: UpdateRow, why: Rejection) -> None:
        task, text = row.task, why.text
        log.error("update rejected", run=self._run, round=task.round, site=task.site, digest=row.digest, why=text)
        self._ledger.reject(row, why)
        self._context.metrics.update_rejected(why.code)

    def _end(self, outcome: Outcome) -> Outcome:
        self._job = None
        return outcome

    def _publish(self, job: AggregationJob, new: Published, *, complete: bool) -> None:
        """Blob first (it is durable already), ledger row second, old blobs go last: a crash between loses nothing."""
        phase, at = job.phase, (self._run, job.phase.round, job.phase.attempt)
        reach("state-stored")
        task_status = "not-needed" if job.complete else "late"
        closed: dict[str, Any] = {"complete": complete, "task_status": task_status, "silent": job.silent}
        if phase.to_refine:
            self._ledger.keep_aggregate(*at, new.address, **closed, statistics=new.statistics)
            reach("aggregate-kept")
            log.info("round aggregated, to be refined", run=self._run, round=phase.round, sites=len(phase.sites))
            return
        self._ledger.publish(*at, new.address, **closed, statistics=new.statistics)
        reach("round-published")
        fields = {"refined_by": min(phase.sites)} if phase.refines else {"sites": len(phase.sites)}
        log.info("round published", run=self._run, round=phase.round, **fields, complete=complete)
        if self._context.keep_rounds:
            before = phase.round - self._context.keep_rounds
            prune(self._ledger, self._context.blobs, self._run, before, self._rankings, self._rules.best_by)
        # Counted last: whatever failed above is done again, and would be counted twice.
        self._context.metrics.round_ended("committed" if complete else "degraded")


class Refinements:
    """Holds the aggregate that is being refined; called from the coordinator's thread, as the run is.

    Attributes:
        aggregate: of the open round; None: it has none yet.
    """

    def __init__(
        self,
        run: str,
        method: RefiningServerMethod,
        publisher: Publisher,
        context: ServerContext,
        invitations: Invitations,
    ) -> None:
        self._run, self._method, self._publisher = run, method, publisher
        self._context, self._ledger, self._invitations = context, context.ledger, invitations
        self.aggregate: Published | None = None

    @classmethod
    def of_run(
        cls, run: str, method: ServerMethod, publisher: Publisher, context: ServerContext, invitations: Invitations
    ) -> Refinements | None:
        """Those of a run; None: its method's states are not refined."""
        half = refining(method)
        return None if half is None else cls(run, half, publisher, context, invitations)

    def restore(self, address: Digest) -> None:
        """Take up an aggregate that was kept before a restart.

        Raises:
            StateError: its blob is gone or damaged.
        """
        self.aggregate = self._publisher.restore(address)

    def expects(self) -> ExpectedUpdate:
        """What the evaluator's update must look like."""
        return NOTHING if self.aggregate is None else self._method.expects_refined(self.aggregate.state)

    def start(self) -> Payload | None:
        """The model that the evaluator moves: of what it is sent, all but the models of single sites."""
        if (aggregate := self.aggregate) is None:  # read once: the round may close meanwhile
            return None
        sent = self._method.to_refine(aggregate.state)
        return {part: tensors for part, tensors in sent.items() if part is not Part.SITE_MODELS}

    def ask(self, phase: phases.Refining) -> None:
        """Invite the evaluator.

        Raises:
            OutOfSpaceError, DiskFailureError: something could not be stored.
        """
        assert self.aggregate is not None  # noqa: S101  (it is durable)
        sites = sorted(phase.requested)
        if phase.tries:  # the evaluator before may have failed because what it was sent had rotted on the disk
            self._publisher.recheck()
        base = drop_private(self._method.to_refine(self.aggregate.state))
        bases = dict.fromkeys(sites, self._publisher.store(base, self.aggregate.state))
        log.info("refinement asked for", run=self._run, round=phase.round, site=sites[0])
        self._invitations.send(TaskKind.REFINE, phase.round, phase.attempt, sites, bases, self._ledger.invite)

    def recall(self, reason: str) -> None:
        """Close the evaluator's invitation, that another can be asked."""
        for row in self._invitations.open_rows():
            last_seen = self._context.presence.last_seen(row.site)
            log.warning("refinement recalled", run=self._run, round=row.round, site=row.site, reason=reason)
            self._ledger.set_task_status(row.task_id, "late", f"{reason}: {last_seen}")
        self._invitations.clear()

    def job(self, phase: phases.Aggregating) -> AggregationJob:
        """What makes the published state of the aggregate and of the evaluator's update."""
        row = self._ledger.newest(self._run)
        assert row is not None and self.aggregate is not None  # noqa: S101, PT018  (it is durable)
        silent = self._invitations.clear()
        return AggregationJob(phase, bool(row.complete), silent, self.aggregate.state, row.statistics)
