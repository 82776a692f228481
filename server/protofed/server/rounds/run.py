"""One run, read from top to bottom: what happens, what the pure machine decides, what is done, what follows.

    sites' calls (`intake`), the timer, the operator ──▶ events ──▶ advance(rules, phase, event) ──▶ phase, effects
                                                          ▲                                             │
                                                          └────── what follows, as events ◀── performed ┘

Every change of the phase goes through `handle`. Effects are performed in the order in which a restart can repeat them:
blobs first, the ledger second, sites last. Whoever performs one returns the events that follow; an aggregation, which
is computed on another thread, comes back as the event `Computed`.

One thread at a time calls the methods, unless a method says otherwise: the server's coordinator thread, or a
simulation's only one. Only aggregation runs elsewhere, through `ServerContext.work`. So no method here takes a lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar, assert_never

import structlog

from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.config.tasks import check_defined
from protofed.common.errors import ConflictError, FailureReason, OutOfSpaceError, StateError
from protofed.common.payload import Payload, SiteId
from protofed.common.protocol.messages import SUM_STEPS, Role, SumOf, TaskKind
from protofed.common.secure_aggregation.groups import Groups
from protofed.server.access.certificates import Certificates
from protofed.server.method import ServerMethod, server_methods
from protofed.server.metrics import ServerMetrics, SumFailure
from protofed.server.rounds.aggregation.aggregation import (
    PAUSE_S,
    Aggregation,
    AggregationJob,
    Computed,
    Outcome,
    Refinements,
)
from protofed.server.rounds.aggregation.publisher import Published, Publisher, check_contributors
from protofed.server.rounds.aggregation.robust_rule import RobustRule, check_robust
from protofed.server.rounds.context import ServerContext, build_method, check_same
from protofed.server.rounds.machine import phases, secure_steps
from protofed.server.rounds.machine.advance import advance, grouped, resumed
from protofed.server.rounds.machine.phases import Sites
from protofed.server.rounds.machine.rules import RoundRules
from protofed.server.rounds.machine.waiting import Waiting, WaitReason, waiting
from protofed.server.rounds.presence import Invitations, absences
from protofed.server.rounds.scores.best_round import check_best_by, kept_state
from protofed.server.rounds.scores.model_warnings import ModelWarning
from protofed.server.rounds.scores.scoring import ScoreMemory, Scoring, WarningLog
from protofed.server.rounds.secure_aggregation.steps import SumRounds
from protofed.server.rounds.secure_aggregation.totals import check_secure
from protofed.server.storage.rows import RoundRow, TaskRow

log = structlog.get_logger()
P = TypeVar("P")


class Run:
    """A run, taken up where the ledger says that it stands.

    Attributes:
        phase: where it is.
        paused: no round is opened.
        broken: what broke it, also as it ended: only a new process, from the ledger, can go on.
        invitations: sites' open tasks.
        sums: its secure aggregation; None: it has none.
        refinements: None: no evaluator makes its states.

    Raises:
        ConfigError: the recipe names an unknown method or option, or has `min_contributors` for simulations only. Or a
            score of a global model judges it, and its method has no global model.
        StateError: the ledger holds another run of this name, or a state that cannot be read.
    """

    def __init__(self, recipe: Recipe, context: ServerContext) -> None:
        check_contributors(recipe, simulated=context.simulated)
        self.recipe, self.name = recipe, recipe.name
        self._context, self._ledger = context, context.ledger
        self.method: ServerMethod = build_method(recipe)
        recipe.check_task()
        check_defined(recipe.method.name, server_methods.about(recipe.method.name).tasks, recipe.task.name)
        check_secure(recipe, self.method)
        check_best_by(recipe, global_model=self.method.global_model)
        check_robust(recipe, self.method)
        rule = RobustRule.of(recipe, self.method)
        fewest, sums = recipe.federation.min_contributors, recipe.federation.fixed_point
        self.publisher = Publisher(self.method, context.blobs, fewest, sums, recipe.fingerprint(), rule)
        scores = ScoreMemory(context.ledger, self.name)
        self.invitations = Invitations(self.name, context.ledger, context.presence, context.notify)
        self.aggregation = Aggregation(recipe, self.publisher, context, scores.ranking, self.handle)
        self.refinements = Refinements.of_run(self.name, self.method, self.publisher, context, self.invitations)
        secure = recipe.federation.secure and not context.simulated
        self.sums = SumRounds(recipe, self.method, context, self.invitations) if secure else None
        contributors = self.sums is not None and self.sums.contributors
        refined = self.refinements is not None
        self._rules = RoundRules.of(recipe, simulated=context.simulated, contributors=contributors, refined=refined)
        self._scoring = Scoring(recipe, context, scores, self.sums, self._rules)
        self._events = deque[phases.Event | Computed]()
        self._stepping = False
        self._full: OutOfSpaceError | None = None  # why the first event waits: what follows could not be recorded
        self._again_at = 0.0  # when it is taken again
        self._disk_full = False  # the last round could not be opened for that
        self.broken: Exception | None = None
        self._published: Published | None = None
        self._ended_with: Digest | None = None  # the last state of a run that had ended before
        self.paused = False
        self.phase = self._restore()
        self._republished = isinstance(self.phase, phases.Aggregating)
        self._taken_up_at = time.time()
        self._warnings = WarningLog(context.ledger, self.name, scores)

    # The loop

    def handle(self, event: phases.Event | Computed) -> None:
        """Take an event, and all that follow from it, in order; while the disk is full, once there is room.

        Raises:
            OutOfSpaceError: of an order to stop the run: it cannot be recorded, and is not obeyed.
        """
        if isinstance(event, phases.Stop) and self._full is not None:
            raise self._full
        self._events.append(event)
        self._go_on()

    def tick(self) -> None:
        """Act on what is due by now: deadlines, sites that went silent, a retry after a full disk.

        Raises:
            Exception: what broke the run earlier; the process has to end and start again from the ledger.
        """
        if self.broken is not None:
            raise self.broken
        if self._republished:  # the last process published a state and died before it went on to scoring
            self._republished = False
            self.handle(self._aggregated())
        for event in self._followed(self.aggregation.retry(self._state)):
            self.handle(event)
        if not self.waits_for_space:
            self._events.append(self._tick())
        self._go_on()

    def _go_on(self) -> None:
        """Take the events one after the other. One that arises within a step waits for its turn.

        After an error, half of an effect may be missing: only a restart, from the ledger, can go on.
        """
        if self._stepping or (self._full is not None and self._context.clock() < self._again_at):
            return
        self._stepping, event = True, None
        try:
            while self._events:
                event = self._take()
                if not self._step(event):
                    break
        except Exception as error:
            if isinstance(event, Computed) or not isinstance(error, OutOfSpaceError):
                self.broken = error
            raise  # an order to stop that cannot be recorded leaves the run as it was
        finally:
            self._stepping = False

    def _take(self) -> phases.Event | Computed:
        """The next event; one that waited has the time of now, so that what it begins has its whole deadline."""
        event, waited = self._events.popleft(), self._full is not None
        self._full = None
        if not waited or isinstance(event, phases.Stop | phases.Broken | Computed):
            return event
        return replace(event, now=self._context.clock())

    def _step(self, event: phases.Event | Computed) -> bool:
        """What an event leads to is done, and what follows from that is queued; False: space is waited for."""
        if isinstance(event, Computed):
            self._events += self._followed(self.aggregation.settled(event, self._state))
            return True
        before, now = self.phase, self._context.clock()
        self.phase, effects = advance(self._rules, before, event)
        scored = phases.is_scoring(before) and not phases.is_scoring(self.phase)
        try:
            if scored:
                self._scoring.close(before)
            for effect in effects:
                self._events += self._performed(effect)
        except OutOfSpaceError as error:
            self._wait_for_space(before, event, error)
            return False
        if scored:
            self.invitations.clear()  # later scores are dropped, and no restart waits for them again
        self._disk_full = self._disk_full and not effects
        step = self.name, before, event, self.phase, effects, now
        count(self._context.metrics, *step, secure=self._rules.secure)
        if not isinstance(before, type(self.phase)) and isinstance(self.phase, phases.Idle | phases.FinishedPhase):
            self._warnings.look()
        closed = isinstance(before, phases.Aggregating) or phases.is_scoring(before)
        if closed and isinstance(self.phase, phases.Idle | phases.Refining):  # at once: a tick may be a second away
            self._events.append(self._tick())
        return True

    def _performed(self, effect: phases.Effect) -> Iterable[phases.Event]:
        """The events that follow from an effect, which is performed here."""
        match effect:
            case phases.Open(phase):
                self._open(phase)
            case phases.AskStep(phase, complete):
                return _required(self.sums).ask(phase, complete=complete)
            case phases.Aggregate(phase, complete, groups):
                if groups:
                    self._ledger.keep_groups(groups)
                return self._started(AggregationJob(phase, complete, self.invitations.clear()))
            case phases.AskRefinement(phase):
                _required(self.refinements).ask(phase)
            case phases.Recall(reason):
                _required(self.refinements).recall(reason)
            case phases.Refine(phase):
                return self._started(_required(self.refinements).job(phase))
            case phases.Abandon(round_, attempt, reason):
                self._ledger.abandon(self.name, round_, attempt, reason, self.invitations.clear())
                log.warning("round abandoned", run=self.name, round=round_, attempt=attempt, reason=reason)
            case phases.AskScores(phase):
                kind, sum_of = (TaskKind.SCORE_SUM, SumOf.SCORES) if phase.secure else (TaskKind.SCORE, None)
                self._invite(kind, phase.round, phase.attempt, phase.awaited, self._ledger.invite, sum_of)
            case phases.Finish(phase):
                self._ledger.end_run(self.name, phase.reason, phase.outcome)
                log.info("run finished", run=self.name, reason=phase.reason, outcome=phase.outcome.value)
                self._close()
            case _:
                assert_never(effect)
        return ()

    def _started(self, job: AggregationJob) -> Iterable[phases.Event]:
        return self._followed(self.aggregation.begin(job, self._state))

    def _followed(self, outcome: Outcome | None) -> Iterable[phases.Event]:
        """The event with which an aggregation ends; none while it is computed, or waits for space."""
        if not isinstance(outcome, Published):
            return () if outcome is None else (outcome,)
        to_refine = isinstance(self.phase, phases.Aggregating) and self.phase.to_refine
        if self.refinements is not None:
            self.refinements.aggregate = outcome if to_refine else None
        if not to_refine:
            self._published = outcome
        return (self._aggregated(),)

    def _open(self, phase: phases.Collecting) -> None:
        log.info("round opened", run=self.name, round=phase.round, attempt=phase.attempt, cohort=sorted(phase.cohort))
        of_phase = phase.round, phase.attempt, phase.size, phase.quorum
        row = RoundRow(self.name, *of_phase, enrolled=phase.enrolled)
        kind = TaskKind.FIT if phase.round else TaskKind.INITIALISE
        sum_of = SumOf.UPDATE if phase.round and self._rules.secure else None
        self._invite(kind, phase.round, phase.attempt, phase.cohort, lambda t: self._ledger.open_round(row, t), sum_of)

    def _invite(
        self,
        kind: TaskKind,
        number: int,
        attempt: int,
        sites: Sites,
        write: Callable[[Sequence[TaskRow]], None],
        sum_of: SumOf | None = None,
    ) -> None:
        bases = {} if self._state is None else self.publisher.broadcasts(self._state, sorted(sites), attempt)
        self.invitations.send(kind, number, attempt, sorted(sites), bases, write, sum_of)

    def _close(self) -> None:
        """The run has ended: nobody and nothing is waited for."""
        self.invitations.clear()
        self.aggregation.drop()
        self._context.notify(None)

    def _wait_for_space(self, before: phases.Phase, event: phases.Event, error: OutOfSpaceError) -> None:
        """Go back to the phase before an event whose effects could not all be recorded."""
        after, self.phase = self.phase, before
        if isinstance(event, phases.Stop):
            if (row := self._ledger.run(self.name)) is not None and row.outcome is not None:
                self.phase = after  # only the journal lacks it, and it is the first thing to be written there
                self._close()
            raise error
        invites = isinstance(after, phases.Collecting) or type(before) is type(after) is phases.Refining
        at = {"round": getattr(before, "round", 0), "where": "inviting sites" if invites else "recording a step"}
        log.error("no space; trying again", run=self.name, **at, why=str(error))
        if invites:  # nothing of it stands: the next tick asks who is there then
            self._disk_full = True
        else:  # some of it may stand, so the same must follow again, and nothing may arrive in between
            self.invitations.clear()
            self._events.appendleft(event)
            self._again_at, self._full = self._context.clock() + PAUSE_S, error

    # Events that say who is there

    def _tick(self) -> phases.Tick:
        """Who is there, with the number of the attempt that would open now.

        Attempts that were rolled back keep their numbers, so rows stay unique.
        """
        tick = self._present()
        if not isinstance(self.phase, phases.Idle):
            return replace(tick, attempt=0)
        last = self._ledger.newest_attempt(self.name, self.phase.round)
        return replace(tick, attempt=1 + last if self.sums is None else self.sums.attempt_after(self.phase.round, last))

    def _present(self) -> phases.Tick:
        """Who is there, without the ledger's number of attempts. May be called from any thread."""
        timeout_s, presence = self.recipe.federation.stall_timeout_s, self._context.presence
        trainers, evaluators = (presence.alive(role, timeout_s) for role in (Role.TRAINER, Role.EVALUATOR))
        return phases.Tick(
            self._context.clock(),
            presence.enrolled(Role.TRAINER),
            trainers,
            evaluators,
            paused=self.paused,
            plateau=self._scoring.plateau,
            groups=self._groups,
        )

    def _aggregated(self) -> phases.Aggregated:
        """The event, with the sites that could score now."""
        tick = self._tick()
        evaluators = tick.evaluators if self.method.global_model else phases.NOBODY
        number = 0 if isinstance(self.phase, phases.FinishedPhase) else self.phase.round
        trainers, groups = self._scoring.askable(tick.trainers, tick.groups, number), tick.groups
        if self._rules.grouping is not None:
            groups = self._rules.grouping.started(groups, trainers)
        return phases.Aggregated(tick.now, evaluators, trainers, groups)

    @property
    def _groups(self) -> Groups:
        """Read anew: they are those of all runs, and an operator may dissolve one."""
        return () if self._rules.grouping is None else self._ledger.groups()

    # What `intake` makes of sites' calls

    def answered(self, row: TaskRow, event: phases.Event) -> None:
        """Close an invitation and advance by the event that closed it."""
        self.invitations.answered(row)
        self.handle(event)

    def decline(self, row: TaskRow, reason: str) -> None:
        """Record that a site does not do its task, and go on without it."""
        log.warning("site declined", run=self.name, round=row.round, site=row.site, reason=reason)
        self._ledger.set_task_status(row.task_id, "failed", reason)
        self.answered(row, phases.Declined(row.site, self._context.clock(), reason, self._makers(row, reason)))

    def _makers(self, row: TaskRow, reason: str) -> Sites:
        """Those who made the first model, if a site's policy may have refused to train on it."""
        if (row.kind, row.round, reason) != (TaskKind.FIT, 1, FailureReason.POLICY):
            return phases.NOBODY
        updates = self._ledger.updates(self.name, 0, self._ledger.newest_attempt(self.name, 0))
        return frozenset(update.task.site for update in updates if update.counts)

    def taken(self, arrivals: Sequence[phases.Arrived]) -> int:
        """How many of the updates arrive until something follows from one, with that one."""
        phase = self.phase
        for number, event in enumerate(arrivals, 1):
            phase, effects = advance(self._rules, phase, event)
            if effects or not isinstance(phase, type(self.phase)):
                return number
        return len(arrivals)

    # Orders of the operator

    def stop(self, reason: str) -> None:
        """End the run; sites stop training at their next heartbeat.

        Raises:
            ConflictError: it has ended.
        """
        self._check_goes_on()
        self.handle(phases.Stop(reason))

    def pause(self, *, paused: bool) -> None:
        """Open no further round, or open them again; an open round goes on to its end.

        Raises:
            ConflictError: it has ended.
        """
        self._check_goes_on()
        self._ledger.pause(self.name, paused=paused)
        self.paused = paused
        log.info("run paused" if paused else "run goes on", run=self.name)

    def _check_goes_on(self) -> None:
        if isinstance(self.phase, phases.FinishedPhase):
            raise ConflictError(f"run '{self.name}' has ended: {self.phase.reason}")

    def roll_back(self, to: int) -> None:
        """Go on from the state that a round published; later attempts stay in the ledger, marked as rolled back.

        Raises:
            ConfigError: that round published none, its state is no longer kept, or no round would follow it.
            StateError: its state is damaged.
            ConflictError: a round is being aggregated now.
        """
        # A job that waits for space has computed nothing yet; a running one would publish on top of the wrong state.
        if self.aggregation.job is not None and not self.aggregation.waits_for_space:
            raise ConflictError("a round is being aggregated at this moment; try again in a few seconds")
        state = kept_state(self._ledger, self._context.blobs, self.name, to)
        self._rules.check_continues(to, self._scoring.plateau_until(to))
        published = self.publisher.restore(state)  # before the ledger: a damaged state must not become current
        try:
            self._ledger.roll_back(self.name, to)
        except StateError as error:
            self.broken = error  # the ledger may have gone back, though its journal does not say so
            raise
        self.aggregation.drop()
        self._events.clear()
        self._full = None
        self.invitations.clear()
        self._republished = False
        self._published, self.phase = published, phases.Idle(to + 1)
        self._scoring.forget()
        self._warnings.roll_back()
        log.warning("run rolled back", run=self.name, round=to)
        self._context.notify(None)

    def check_regrouping(self) -> None:
        """Check that no secure aggregation is open, whose groups must stay.

        Raises:
            ConflictError: one is.
        """
        rules = self.recipe.federation
        is_open = isinstance(self.phase, phases.Summing | phases.Aggregating)
        if rules.secure and (is_open or self.waits_for_space):
            raise ConflictError(
                f"run '{self.name}' has a secure aggregation open, and its groups cannot change before its end. Pause "
                f"the run, and try again after the aggregation (each step takes {rules.sum_step_s:.0f} s at most)"
            )

    def regrouped(self) -> None:
        """Go on with the groups that are left: one was dissolved, while no sum was open."""
        self.phase = self._grouped(self.phase)

    def dismiss(self, site: SiteId, reason: str) -> None:
        """Decline a site's open task in its place: it is excluded, or takes no tasks now."""
        if (row := self.invitations.of(site)) is not None:
            self.decline(row, reason)

    # What there is to see

    @property
    def published(self) -> Published | None:
        """The newest state; None before there is a model."""
        if self._published is None and self._ended_with is not None:
            self._published = self.publisher.restore(self._ended_with)
        return self._published

    @property
    def _state(self) -> Payload | None:
        return self.published.state if self.published else None

    @property
    def waits_for_space(self) -> bool:
        """Whether it is decided how the run goes on, and the ledger may lack a part. Asked from any thread."""
        return self._full is not None

    @property
    def warnings(self) -> list[ModelWarning]:
        """What speaks against the run's models, as of the last closed round. May be read from any thread."""
        return self._warnings.now

    def deadline_began(self, row: RoundRow) -> float:
        """Since when the deadline of an open round counts, in Unix time: a restart of the server begins it again.

        May be called from any thread.
        """
        return max(row.opened_at, self._taken_up_at)

    def waiting(self, certificates: Certificates) -> Waiting | None:
        """Why the run does not go on; None: it does, or has ended. May be called from any thread."""
        if self.waits_for_space and not isinstance(phase := self.phase, phases.FinishedPhase):
            return Waiting(WaitReason.DISK, phase.round)
        disk_full = self._disk_full or self.aggregation.waits_for_space
        known = self._context.presence, certificates, self.recipe.federation.stall_timeout_s
        return waiting(self._rules, self.phase, self._present(), lambda: absences(*known), disk_full=disk_full)

    # Beginning

    def _restore(self) -> phases.Phase:
        """The phase that the ledger's rows amount to; a run that the ledger does not know begins."""
        run = self._ledger.run(self.name)
        if run is None:
            self._ledger.begin_run(self.name, self.recipe.fingerprint(), self.recipe.wire())
            return phases.Idle(0)
        check_same(self.recipe, run)
        self.paused = run.paused
        rounds = self._ledger.rounds(self.name)
        states = [row.state for row in rounds if row.state]
        if run.outcome is not None:
            self._ended_with = states[-1] if states else None  # decoded on demand: most ended runs are only looked at
            return phases.FinishedPhase(run.reason or "", run.outcome)
        return self._resumed(rounds, states) if rounds else phases.Idle(0)

    def _resumed(self, rounds: Sequence[RoundRow], states: Sequence[Digest]) -> phases.Phase:
        """Where the newest attempt of a run that goes on has got to."""
        self._published = self.publisher.restore(states[-1]) if states else None
        last = rounds[-1]
        if self.refinements is not None and last.aggregate is not None and last.state is None:
            self.refinements.restore(last.aggregate)
        log.info("run resumed", run=self.name, round=last.round)
        tasks = self._ledger.tasks(self.name, last.round, last.attempt)
        summing_scores = [task for task in tasks if task.kind in SUM_STEPS and task.sum_of is SumOf.SCORES]
        self.invitations.take_up(summing_scores or tasks)  # a sum of scores waits for no evaluator
        tries = sum(row.round == last.round and row.abandoned is not None for row in rounds)
        required = frozenset(self.recipe.federation.required_sites)
        due = self._rules.secure and self._rules.owns_due(last.round)
        there = self._present()
        scorers = self._scoring.askable(there.trainers, there.groups, last.round) if due else phases.NOBODY
        now, contributors = self._context.clock(), self._rules.contributors
        return self._grouped(resumed(last, tasks, now, tries, required, contributors=contributors, scorers=scorers))

    def _grouped(self, phase: phases.Phase) -> phases.Phase:
        return phase if self._rules.grouping is None else grouped(phase, self._groups, self._rules.grouping)


def _required(part: P | None) -> P:
    """What the effects of a phase need: no run without it has such phases."""
    assert part is not None  # noqa: S101
    return part


def count(
    metrics: ServerMetrics,
    run: str,
    before: phases.Phase,
    event: phases.Event,
    after: phases.Phase,
    effects: Sequence[phases.Effect],
    now: float,
    *,
    secure: bool,
) -> None:
    """Count one step of the state machine, once it is carried out: on a full disk it may be tried many times.

    Args:
        now: seconds of the coordinator's monotonic clock.
        secure: the run has secure aggregation.
    """
    metrics.phase_changed(run, phases.name(before), phases.name(after), now)
    if abandoned := any(isinstance(effect, phases.Abandon) for effect in effects):
        metrics.round_ended("abandoned")
    match before:
        case phases.Summing(step=step, opened=opened):
            if isinstance(after, phases.Summing) and after.step is step:
                return
            metrics.sum_step_ended(step, now - opened, len(_dropouts(before, event, after)))
            if abandoned or _gives_no_scores(before, event, after):
                metrics.sum_abandoned(step, _failure(before, event))
        case phases.Aggregating(round=number) if secure and abandoned and number:  # what was revealed opens nothing
            metrics.sum_abandoned(TaskKind.REVEAL, SumFailure.UNUSABLE)
        case phases.Collecting():  # with its quorum a round is abandoned only because its sum cannot begin
            reported = before.reported | _arrived(before.cohort, event)
            if abandoned and len(reported) >= before.quorum and before.required <= reported:
                metrics.sum_abandoned(TaskKind.FIT, SumFailure.TOO_FEW)


def _dropouts(before: phases.Summing, event: phases.Event, after: phases.Phase) -> Sites:
    """Who was asked for the step and is not asked for the next; after the last one, or a failure, who did not report.

    Nobody drops out of a step that what sites sent before cannot be asked for, nor because the run is stopped.
    """
    if isinstance(after, phases.Summing):
        return before.cohort - after.cohort
    if isinstance(event, phases.Insufficient | phases.Stop | phases.Broken):
        return phases.NOBODY
    return before.cohort - before.reported - _arrived(before.cohort, event)


def _gives_no_scores(before: phases.Summing, event: phases.Event, after: phases.Phase) -> bool:
    """Whether a sum of own scores has ended without what it needs to be opened; its round is not abandoned for that."""
    goes_on, stopped = isinstance(after, phases.Summing), isinstance(event, phases.Stop | phases.Broken)
    if before.sum_of is not SumOf.SCORES or goes_on or stopped:
        return False
    revealed = before.reported | _arrived(before.cohort, event) if before.step is SUM_STEPS[-1] else phases.NOBODY
    return isinstance(event, phases.Insufficient) or len(revealed) < before.threshold


def _failure(before: phases.Summing, event: phases.Event) -> SumFailure:
    if isinstance(event, phases.Insufficient):
        return SumFailure.UNUSABLE
    return SumFailure.LEFT if secure_steps.is_whole(before) else SumFailure.TOO_FEW


def _arrived(cohort: Sites, event: phases.Event) -> frozenset[SiteId]:
    return frozenset({event.site}) & cohort if isinstance(event, phases.Arrived) else phases.NOBODY
