"""Performs what the round's state machine decides, for one run: invitations, aggregation, publication, end.

The state machine is pure; every effect that it asks for happens here, in the order in which a restart can repeat it:
blobs first, the ledger second, sites last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, assert_never, cast

import structlog

from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConflictError, FailureReason, OutOfSpaceError, StateError
from protofed.common.payload import Payload, SiteId
from protofed.common.protocol.messages import SUM_STEPS, Subject, TaskKind
from protofed.server.method import NOTHING, ExpectedUpdate, OwnStartMethod, ServerMethod
from protofed.server.rounds import phase_metrics, phases
from protofed.server.rounds.aggregation import Aggregation, AggregationJob
from protofed.server.rounds.best_round import check_best_by
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.event_queue import EventQueue
from protofed.server.rounds.invitations import Invitations
from protofed.server.rounds.min_contributors import check_contributors
from protofed.server.rounds.model_history import WarningLog
from protofed.server.rounds.phases import Sites
from protofed.server.rounds.publisher import Published, Publisher
from protofed.server.rounds.refinement import Refinements
from protofed.server.rounds.resume import check_same, grouped, method_of, resumed
from protofed.server.rounds.retention import kept_state
from protofed.server.rounds.robust_rule import RobustRule, check_robust
from protofed.server.rounds.round_rules import RoundRules
from protofed.server.rounds.score_memory import ScoreMemory
from protofed.server.rounds.scoring import Scoring
from protofed.server.rounds.secure_sums import check_secure
from protofed.server.rounds.state_machine import advance
from protofed.server.rounds.sum_steps import SumRounds
from protofed.server.rounds.tick_source import TickSource
from protofed.server.rounds.waiting import Absences, Waiting, WaitReason, waiting
from protofed.server.storage.rows import RoundRow, TaskRow

log = structlog.get_logger()


class Driver:
    """Holds a run's phase, newest state and open invitations; every change of the phase goes through `handle`.

    Raises:
        ConfigError: the recipe names an unknown method or option, has `min_contributors` for simulations only, or is
            judged by a score of a global model that its method does not have.
        StateError: the ledger holds another run of this name, or a state that cannot be read.
    """

    def __init__(self, recipe: Recipe, context: ServerContext) -> None:
        check_contributors(recipe, simulated=context.simulated)
        self._recipe, self._run = recipe, recipe.name
        self._context, self._ledger = context, context.ledger
        self._method: ServerMethod = method_of(recipe)
        check_secure(recipe, self._method)
        check_best_by(recipe, global_model=self._method.global_model)
        fewest, sums = recipe.federation.min_contributors, recipe.federation.fixed_point
        check_robust(recipe, self._method)
        rule = RobustRule.of(recipe, self._method)
        self._publisher = Publisher(self._method, context.blobs, fewest, sums, recipe.fingerprint(), rule)
        guarded = replace(context, work=self._work)
        self._scores = ScoreMemory(context.ledger, self._run)
        self.invitations = Invitations(self._run, context)
        self._refinements = Refinements.of_run(self._run, self._method, self._publisher, context, self.invitations)
        self._aggregation = Aggregation(recipe, self._publisher, guarded, self._scores.ranking, self._aggregation_ended)
        summed = recipe.federation.secure and not context.simulated
        self.sums = SumRounds(recipe, self._method, context, self.invitations) if summed else None
        holders = self.sums is not None and self.sums.holders
        refined = self._refinements is not None
        self._rules = RoundRules.of(recipe, simulated=context.simulated, holders=holders, refined=refined)
        self._scoring = Scoring(recipe, context, self._scores, self.sums, self._rules)
        self._ticks = TickSource(recipe, self._method, context, self._rules, self._scoring, self.sums)
        self._events = EventQueue(context.clock)
        self._draining = False
        self.broken: Exception | None = None  # only a new process, from the ledger, can go on
        self._published: Published | None = None
        self._ended_with: Digest | None = None  # the last state of a run that had ended before
        self._disk_full = False  # the last round could not be opened for that
        self.paused = False
        self.phase = self._restore()
        self._republished = isinstance(self.phase, phases.Aggregating)
        self.warnings = WarningLog(context.ledger, self._run, self._scores)

    @property
    def published(self) -> Published | None:
        """The newest state; None before there is a model."""
        if self._published is None and self._ended_with is not None:
            self._published = self._publisher.restore(self._ended_with)
        return self._published

    @property
    def waits_for_space(self) -> bool:
        """Whether it is decided how the run goes on, and the ledger may have half of it. Asked from any thread."""
        return self._events.full is not None

    def broadcast(self, address: Digest) -> Payload | None:
        """What this round's sites were sent, if it is at this address and in memory. May be called from any thread."""
        return self._publisher.stored(address)

    def own_start(self, state: Payload, site: SiteId, update: Payload) -> Payload | None:
        """As `OwnStartMethod.start`; None: sites train from what they are sent."""
        has_own = callable(getattr(self._method, "start", None))
        return cast("OwnStartMethod", self._method).start(state, site, update) if has_own else None

    def refined_from(self) -> Payload | None:
        """What an evaluator's update is a move from. May be called from any thread."""
        return None if self._refinements is None else self._refinements.start()

    def was_complete(self, row: TaskRow) -> bool | None:
        """Whether the invitation's round got all its updates, while it is being aggregated; None: ask the ledger."""
        job = self._aggregation.job
        if job is None or job.phase.refines or (job.phase.round, job.phase.attempt) != (row.round, row.attempt):
            return None
        return job.complete

    def expected(self, row: TaskRow) -> ExpectedUpdate:
        """What an update that answers the invitation must look like."""
        if row.kind is TaskKind.REFINE:
            return NOTHING if self._refinements is None else self._refinements.expects()
        if row.kind is TaskKind.INITIALISE or row.subject is not None or self.published is None:
            return NOTHING
        return self._method.expects(self.published.state)

    def taken(self, arrivals: Sequence[phases.Arrived]) -> int:
        """How many of these updates arrive before anything follows from one; that one is counted, too."""
        phase = self.phase
        for number, event in enumerate(arrivals, 1):
            phase, effects = advance(self._rules, phase, event)
            if effects or not isinstance(phase, type(self.phase)):
                return number
        return len(arrivals)

    def answered(self, row: TaskRow, event: phases.Event) -> None:
        """Close an invitation and advance by the event that closed it."""
        self.invitations.answered(row)
        self.handle(event)

    def tick(self) -> None:
        """Act on what is due by now.

        Raises:
            Exception: what broke the run earlier; the process has to end and start again from the ledger.
        """
        if self.broken is not None:
            raise self.broken
        if self._republished:  # the last process published a state and died before it went on to scoring
            self._republished = False
            self.handle(self._ticks.aggregated(self.phase, paused=self.paused))
        self._aggregation.tick(self._state)
        if not self.waits_for_space:
            self._events.add(self._ticks.tick(self.phase, paused=self.paused))
        self._take_events()

    def waiting(self, absences: Callable[[], Absences]) -> Waiting | None:
        """Why the run does not go on; as `waiting.waiting`, also as to `absences`. May be called from any thread."""
        if self.waits_for_space and not isinstance(phase := self.phase, phases.FinishedPhase):
            return Waiting(WaitReason.DISK, phase.round)
        disk_full = self._disk_full or self._aggregation.waits_for_space
        return waiting(self._rules, self.phase, self._ticks.present(paused=self.paused), absences, disk_full=disk_full)

    def pause(self, *, paused: bool) -> None:
        """Open no further round, or open them again; an open round goes on to its end."""
        self._ledger.pause(self._run, paused=paused)
        self.paused = paused
        log.info("run paused" if paused else "run goes on", run=self._run)

    def roll_back(self, to: int) -> None:
        """Go on from the state that a round published; later attempts stay in the ledger, marked as rolled back.

        Raises:
            ConfigError: that round published none, its state is no longer kept, or no round would follow it.
            StateError: its state is damaged.
            ConflictError: a round is being aggregated now.
        """
        # A job that waits for space has computed nothing yet; a running one would publish on top of the wrong state.
        if self._aggregation.job is not None and not self._aggregation.waits_for_space:
            raise ConflictError("a round is being aggregated at this moment; try again in a few seconds")
        state = kept_state(self._ledger, self._context.blobs, self._run, to)
        self._rules.check_continues(to, self._scoring.standstill_of(to))
        published = self._publisher.restore(state)  # before the ledger: a damaged state must not become current
        try:
            self._ledger.roll_back(self._run, to)
        except StateError as error:
            self.broken = error  # the ledger may have gone back, though its journal does not say so
            raise
        self._aggregation.drop()
        self._events.clear()
        self.invitations.clear()
        self._republished = False
        self._published, self.phase = published, phases.Idle(to + 1)
        self._scoring.forget()
        self.warnings.roll_back()
        log.warning("run rolled back", run=self._run, round=to)
        self._context.notify(None)

    def regrouped(self) -> None:
        """Go on with the groups that are left: one was dissolved, while no sum was open."""
        self.phase = self._grouped(self.phase)

    def dismiss(self, site: SiteId, reason: str) -> None:
        """Decline a site's open task in its place: it is excluded, or takes no tasks now."""
        if (row := self.invitations.of(site)) is not None:
            self.decline(row, reason)

    def decline(self, row: TaskRow, reason: str) -> None:
        """Record that a site does not do its task, and go on without it."""
        log.warning("site declined", run=self._run, round=row.round, site=row.site, reason=reason)
        self._ledger.set_task_status(row.task_id, "failed", reason)
        self.answered(row, phases.Declined(row.site, self._context.clock(), reason, self._makers(row, reason)))

    def _makers(self, row: TaskRow, reason: str) -> Sites:
        """Those who made the first model, if a site's policy may have refused to train on it."""
        if (row.kind, row.round, reason) != (TaskKind.FIT, 1, FailureReason.POLICY):
            return phases.NOBODY
        updates = self._ledger.updates(self._run, 0, self._ledger.newest_attempt(self._run, 0))
        return frozenset(update.task.site for update in updates if update.counts)

    def handle(self, event: phases.Event) -> None:
        """Advance by this event and all that follow from it, in order; while the disk is full, once there is room.

        Raises:
            OutOfSpaceError: of an order to stop the run: it cannot be recorded, and is not obeyed.
        """
        if isinstance(event, phases.Stop) and self._events.full is not None:
            raise self._events.full
        self._events.add(event)
        self._take_events()

    def _take_events(self) -> None:
        if self._draining or not self._events.is_due:  # draining: an effect raised it, as a simulation's aggregation
            return
        self._draining = True
        try:
            self._drain()
        except Exception as error:
            if not isinstance(error, OutOfSpaceError):  # which is of an order to stop: the run is as it was
                self.broken = error  # half of an effect may be missing: only a restart, from the ledger, can go on
            raise
        finally:
            self._draining = False

    def _drain(self) -> None:
        while (event := self._events.take()) is not None:
            before, now = self.phase, self._context.clock()
            self.phase, effects = advance(self._rules, before, event)
            scored = phases.is_scoring(before) and not phases.is_scoring(self.phase)
            try:
                if scored:
                    self._scoring.close(before)
                for effect in effects:
                    self._perform(effect)
            except OutOfSpaceError as error:
                self._wait_for_space(before, event, error)
                return
            if scored:
                self.invitations.clear()  # later scores are dropped, and no restart waits for them again
            self._disk_full = self._disk_full and not effects
            step = self._run, before, event, self.phase, effects, now
            phase_metrics.count(self._context.metrics, *step, summed=self._rules.summed)
            if not isinstance(before, type(self.phase)) and isinstance(self.phase, phases.Idle | phases.FinishedPhase):
                self.warnings.look()
            closed = isinstance(before, phases.Aggregating) or phases.is_scoring(before)
            if closed and isinstance(self.phase, phases.Idle | phases.Refining):  # at once: a tick may be a second away
                self._events.add(self._ticks.tick(self.phase, paused=self.paused))

    def _wait_for_space(self, before: phases.Phase, event: phases.Event, error: OutOfSpaceError) -> None:
        """Go back to the phase before an event of which not all effects could be recorded."""
        after, self.phase = self.phase, before
        if isinstance(event, phases.Stop):
            if (row := self._ledger.run(self._run)) is not None and row.outcome is not None:
                self.phase = after  # only the journal lacks it, and it is the first thing to be written there
                self._close()
            raise error
        invites = isinstance(after, phases.Collecting) or type(before) is type(after) is phases.Refining
        at = {"round": getattr(before, "round", 0), "where": "inviting sites" if invites else "recording a step"}
        log.error("no space; trying again", run=self._run, **at, why=str(error))
        if invites:  # nothing of it stands: the next tick asks who is there then
            self._disk_full = True
        else:  # some of it may stand, so the same must follow again, and nothing may arrive in between
            self.invitations.clear()
            self._events.put_back(event, error)

    def _perform(self, effect: phases.Effect) -> None:
        match effect:
            case phases.Open(phase):
                self._open(phase)
            case phases.AskStep(phase, complete):
                assert self.sums is not None  # noqa: S101  (no other run has such a phase)
                if why := self.sums.ask(phase, complete=complete):
                    self.handle(phases.Insufficient(why, self._context.clock()))
            case phases.Aggregate(phase, complete, groups):
                if groups:
                    self._ledger.keep_groups(groups)
                self._aggregation.begin(AggregationJob(phase, complete, self.invitations.clear()), self._state)
            case phases.AskRefinement() | phases.Recall() | phases.Refine():
                assert self._refinements is not None  # noqa: S101  (no other run has such effects)
                if (job := self._refinements.perform(effect)) is not None:
                    self._aggregation.begin(job, self._state)
            case phases.Abandon(round_, attempt, reason):
                self._ledger.abandon(self._run, round_, attempt, reason, self.invitations.clear())
                log.warning("round abandoned", run=self._run, round=round_, attempt=attempt, reason=reason)
            case phases.AskScores(phase):
                kind, subject = (TaskKind.SCORE_SUM, Subject.SCORES) if phase.summed else (TaskKind.SCORE, None)
                self._invite(kind, phase.round, phase.attempt, phase.awaited, self._ledger.invite, subject)
            case phases.Finish(phase):
                self._ledger.end_run(self._run, phase.reason, phase.outcome)
                log.info("run finished", run=self._run, reason=phase.reason, outcome=phase.outcome.value)
                self._close()
            case _:
                assert_never(effect)

    def _close(self) -> None:
        """The run has ended: nobody and nothing is waited for."""
        self.invitations.clear()
        self._aggregation.drop()
        self._context.notify(None)

    def _open(self, phase: phases.Collecting) -> None:
        log.info("round opened", run=self._run, round=phase.round, attempt=phase.attempt, cohort=sorted(phase.cohort))
        of_phase = phase.round, phase.attempt, phase.size, phase.quorum
        row = RoundRow(self._run, *of_phase, enrolled=phase.enrolled)
        kind = TaskKind.FIT if phase.round else TaskKind.INITIALISE
        subject = Subject.UPDATE if phase.round and self._rules.summed else None
        self._invite(kind, phase.round, phase.attempt, phase.cohort, lambda t: self._ledger.open_round(row, t), subject)

    def _invite(
        self,
        kind: TaskKind,
        number: int,
        attempt: int,
        sites: Sites,
        write: Callable[[Sequence[TaskRow]], None],
        subject: Subject | None = None,
    ) -> None:
        bases = {} if self._state is None else self._publisher.broadcasts(self._state, sorted(sites), attempt)
        self.invitations.send(kind, number, attempt, sorted(sites), bases, write, subject)

    def _work(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """`ServerContext.work`, but an error in `done` breaks the run: an executor would swallow it."""

        def guarded(result: Any) -> None:
            try:
                done(result)
            except Exception as error:
                self.broken = error
                raise

        self._context.work(job, guarded)

    def _aggregation_ended(self, job: AggregationJob, outcome: Published | phases.Insufficient | phases.Broken) -> None:
        """Called on the coordinator's thread when an aggregation is over."""
        if not isinstance(outcome, Published):
            self.handle(outcome)
            return
        if self._refinements is not None:
            self._refinements.aggregate = outcome if job.phase.to_refine else None
        if not job.phase.to_refine:
            self._published = outcome
        self.handle(self._ticks.aggregated(self.phase, paused=self.paused))

    def _restore(self) -> phases.Phase:
        """The phase that the ledger's rows amount to; a run that the ledger does not know begins."""
        run = self._ledger.run(self._run)
        if run is None:
            self._ledger.begin_run(self._run, self._recipe.fingerprint(), self._recipe.wire())
            return phases.Idle(0)
        check_same(self._recipe, run)
        self.paused = run.paused
        rounds = self._ledger.rounds(self._run)
        states = [row.state for row in rounds if row.state]
        if run.outcome is not None:
            self._ended_with = states[-1] if states else None  # decoded on demand: most ended runs are only looked at
            return phases.FinishedPhase(run.reason or "", run.outcome)
        if not rounds:
            return phases.Idle(0)
        self._published = self._publisher.restore(states[-1]) if states else None
        last = rounds[-1]
        if self._refinements is not None and last.aggregate is not None and last.state is None:
            self._refinements.restore(last.aggregate)
        log.info("run resumed", run=self._run, round=last.round)
        tasks = self._ledger.tasks(self._run, last.round, last.attempt)
        summing_scores = [task for task in tasks if task.kind in SUM_STEPS and task.subject is Subject.SCORES]
        self.invitations.take_up(summing_scores or tasks)  # a sum of scores waits for no evaluator
        tries = sum(row.round == last.round and row.abandoned is not None for row in rounds)
        required = frozenset(self._recipe.federation.required_sites)
        due = self._rules.summed and self._rules.owns_due(last.round)
        there = self._ticks.present(paused=self.paused)
        scorers = self._scoring.askable(there.trainers, there.groups, last.round) if due else phases.NOBODY
        now, holders = self._context.clock(), self._rules.holders
        return self._grouped(resumed(last, tasks, now, tries, required, holders=holders, scorers=scorers))

    def _grouped(self, phase: phases.Phase) -> phases.Phase:
        return phase if self._rules.grouping is None else grouped(phase, self._ticks.groups, self._rules.grouping)

    @property
    def _state(self) -> Payload | None:
        return self.published.state if self.published else None
