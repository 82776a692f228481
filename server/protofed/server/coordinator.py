"""The coordinator: performs what the round machine decides, for one run. Knows no wire.

All methods are called from one thread at a time; only `work` may run a job elsewhere.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, assert_never

import structlog

import protofed.server.methods  # noqa: F401  (registers the server halves)
from protofed.common.codec import Digest
from protofed.common.errors import ProtocolError, ProtofedError, StateError
from protofed.common.payload import SiteId
from protofed.common.recipe import Recipe
from protofed.common.task import (
    Activity,
    Finished,
    Manifest,
    Progress,
    Receipt,
    Role,
    Scores,
    Signal,
    Task,
    TaskKind,
    Verdict,
    Wait,
)
from protofed.server import phases, screening
from protofed.server.admission import Admission
from protofed.server.blobs import Blobs
from protofed.server.ledger import Ledger
from protofed.server.method import Expected, ServerMethod, server_methods
from protofed.server.overview import spreads
from protofed.server.publisher import Published, Publisher
from protofed.server.resume import resumed
from protofed.server.roster import Roster
from protofed.server.round import Rules, advance
from protofed.server.rows import RoundRow, TaskRow
from protofed.server.sampling import Uniform

log = structlog.get_logger()
NOTHING = Expected(())


class Work(Protocol):
    """Runs a job, here or on another thread, then `done` with its result on the coordinator's thread."""

    def __call__(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run it."""


def inline(job: Callable[[], Any], done: Callable[[Any], None]) -> None:
    """`Work` of a simulation: at once."""
    done(job())


@dataclass(frozen=True)
class Surroundings:
    """What a coordinator stands on; one server's runs share it.

    Attributes:
        clock: monotonic seconds.
        notify: called with the sites that have something to ask for now; None: all.
        keep_rounds: rounds behind the newest whose blobs are kept.
    """

    ledger: Ledger
    blobs: Blobs
    roster: Roster
    clock: Callable[[], float]
    work: Work = inline
    notify: Callable[[Iterable[SiteId] | None], None] = lambda _sites: None
    keep_rounds: int = 2


class Coordinator:
    """One run, as far as the ledger says it has come.

    Raises:
        ConfigError: the recipe names an unknown method or option.
        StateError: the ledger holds another run of this name, or a state that cannot be read.
    """

    def __init__(self, recipe: Recipe, around: Surroundings) -> None:
        self.recipe, self.run = recipe, recipe.name
        self._around, self._ledger = around, around.ledger
        self._method: ServerMethod = server_methods.build(recipe.method.name, recipe.method.options)
        self._rules = Rules(recipe.rounds, recipe.federation, Uniform(recipe.seed))
        self._admission = Admission(self._ledger, self.run, recipe.classes)
        self._publisher = Publisher(self._method, around.blobs, recipe.classes)
        self._published: Published | None = None
        self._tasks: dict[SiteId, TaskRow] = {}  # the open invitations
        self._events: deque[phases.Event] = deque()
        self._draining = False
        self._broken: Exception | None = None
        self._phase = self._restore()
        self._republished = isinstance(self._phase, phases.Aggregating)

    @property
    def phase(self) -> phases.Phase:
        """Where the run is."""
        return self._phase

    @property
    def published(self) -> Published | None:
        """The newest state; None before there is a model."""
        return self._published

    # What sites ask

    def next_task(self, site: SiteId, instance: str) -> Task | Wait | Finished:
        """What the site should do now."""
        self._around.roster.seen(site, instance)
        if isinstance(self._phase, phases.Finished):
            return Finished(self._phase.reason, last=True)
        row = self._tasks.get(site)
        if row is None:
            return Wait(retry_after_s=1.0)
        return Task(row.kind, self.run, row.round, row.nonce, row.base, row.base_bytes, self._remaining())

    def may_fetch(self, site: SiteId, address: Digest) -> bool:
        """Whether the site's own open task names this blob."""
        row = self._tasks.get(site)
        return row is not None and row.base == address

    def heartbeat(self, site: SiteId, instance: str, progress: Progress) -> Signal:
        """Note how far a site is; ABORT when nobody waits for its task any more."""
        if progress.activity is Activity.IDLE:
            self._around.roster.seen(site, instance)
            return Signal.CONTINUE
        self._around.roster.seen(site, instance, progress)
        row = self._tasks.get(site)
        if row is None or row.nonce != progress.nonce:
            return Signal.ABORT
        if progress.failure is not None:
            self._decline(row, progress.failure)
        elif row.fate == "invited":
            self._tasks[site] = replace(row, fate="started")
            self._ledger.set_fate(row.nonce, "started")
        return Signal.CONTINUE

    def begin(self, site: SiteId, instance: str, nonce: str, base: Digest | None, manifest: Manifest) -> Receipt | None:
        """Judge an upload before a byte of it is sent; None: send it."""
        self._around.roster.seen(site, instance, nonce)
        row = self._admission.invitation(site, nonce, TaskKind.INITIALISE, TaskKind.FIT)
        settled = self._admission.settled(row, manifest, is_open=self._is_open(row))
        return settled or self._admission.announced(row, base, manifest, self._expected(row))

    def commit(
        self, site: SiteId, instance: str, nonce: str, manifest: Manifest, metrics: Scores, weight: float | None
    ) -> Receipt:
        """Judge an update whose blob is durable and sound; ACCEPTED counts from here on."""
        self._around.roster.seen(site, instance)
        row = self._admission.invitation(site, nonce, TaskKind.INITIALISE, TaskKind.FIT)
        if (settled := self._admission.settled(row, manifest, is_open=self._is_open(row))) is not None:
            return settled
        if fault := screening.scalars_fault(metrics, weight, self._expected(row)):
            return self._admission.judge(row, Verdict.INVALID, manifest, fault)
        receipt = self._admission.judge(row, Verdict.ACCEPTED, manifest, "", metrics, weight)
        del self._tasks[site]
        self._handle(phases.Arrived(site, self._around.clock()))
        return receipt

    def refuse(self, site: SiteId, nonce: str, manifest: Manifest, fault: str) -> Receipt:
        """Write down that an uploaded blob is not what was announced, or is not finite."""
        row = self._admission.invitation(site, nonce, TaskKind.INITIALISE, TaskKind.FIT)
        return self._admission.judge(row, Verdict.INVALID, manifest, fault)

    def report_scores(self, site: SiteId, instance: str, nonce: str, scores: Scores) -> None:
        """Take a site's scores; those that nobody waits for are dropped politely.

        Raises:
            ProtocolError: they are not at most 64 finite numbers.
        """
        self._around.roster.seen(site, instance)
        row = self._admission.invitation(site, nonce, TaskKind.SCORE)
        if fault := screening.scalars_fault(scores, None, NOTHING):
            raise ProtocolError(fault)
        if not self._is_open(row):
            return
        self._ledger.add_scores(row, scores)
        del self._tasks[site]
        self._handle(phases.Scored(site))

    # What time and the operator do

    def tick(self) -> None:
        """Let time act.

        Raises:
            Exception: what broke the coordinator before; the process has to end and start again from the ledger.
        """
        if self._broken is not None:
            raise self._broken
        if self._republished:  # the last process published a state and died before it said so
            self._republished = False
            self._handle(phases.Aggregated(self._around.clock(), self._scorers()))
        self._handle(self._tick_event())

    def stop(self, reason: str) -> None:
        """End the run."""
        self._handle(phases.Stop(reason))

    # What the machine decides

    def _handle(self, event: phases.Event) -> None:
        """Advance by this event and all that follow from it, in order."""
        self._events.append(event)
        if self._draining:
            return
        self._draining = True
        try:
            self._drain()
        except Exception as error:
            self._broken = error  # half of an effect may be missing: only a restart, from the ledger, can go on
            raise
        finally:
            self._draining = False

    def _drain(self) -> None:
        while self._events:
            before = self._phase
            self._phase, effects = advance(self._rules, before, self._events.popleft())
            if isinstance(before, phases.Evaluating) and not isinstance(self._phase, phases.Evaluating):
                self._tasks.clear()  # scores that come now are dropped, and a restart does not wait for them again
                self._ledger.mark_scored(self.run, before.round)
            for effect in effects:
                self._perform(effect)
            if isinstance(before, phases.Evaluating) and before.round != getattr(self._phase, "round", None):
                self._tell_scores(before.round)
            closed = isinstance(before, phases.Aggregating | phases.Evaluating)
            if closed and isinstance(self._phase, phases.Idle):
                self._events.append(self._tick_event())  # the next round opens now, not at the next tick

    def _perform(self, effect: phases.Effect) -> None:
        match effect:
            case phases.Open(phase):
                self._open(phase)
            case phases.Aggregate(phase, complete):
                self._aggregate(phase, complete=complete)
            case phases.Abandon(round_, attempt, reason):
                log.warning("round abandoned", run=self.run, round=round_, attempt=attempt, reason=reason)
                self._tasks.clear()
                self._ledger.abandon(self.run, round_, attempt, reason)
            case phases.Score(phase):
                attempt = self._ledger.rounds(self.run)[-1].attempt  # the one that gave the model
                self._invite(TaskKind.SCORE, phase.round, attempt, sorted(phase.awaited), self._ledger.invite)
            case phases.Finish(phase):
                log.info("run finished", run=self.run, reason=phase.reason, failed=phase.failed)
                self._tasks.clear()
                self._ledger.end_run(self.run, phase.reason, failed=phase.failed)
                self._around.notify(None)
            case _:
                assert_never(effect)

    def _open(self, phase: phases.Collecting) -> None:
        log.info("round opened", run=self.run, round=phase.round, attempt=phase.attempt, cohort=sorted(phase.cohort))
        row = RoundRow(self.run, phase.round, phase.attempt, phase.size, phase.quorum)
        kind = TaskKind.FIT if phase.round else TaskKind.INITIALISE
        self._invite(kind, phase.round, phase.attempt, sorted(phase.cohort), lambda t: self._ledger.open_round(row, t))

    def _invite(
        self, kind: TaskKind, number: int, attempt: int, sites: list[SiteId], write: Callable[[Sequence[TaskRow]], None]
    ) -> None:
        """Broadcast blobs first, ledger rows second; then the sites are told."""
        state = self._published.state if self._published else None
        sent = self._publisher.broadcasts(state, sites) if state is not None else {}
        rows = []
        for site in sites:
            base, nbytes = sent.get(site, (None, 0))
            rows.append(TaskRow(secrets.token_hex(16), self.run, number, attempt, site, kind, base, nbytes))
        write(rows)
        self._tasks = {row.site: row for row in rows}
        self._around.notify(sites)

    def _aggregate(self, phase: phases.Aggregating, *, complete: bool) -> None:
        self._tasks.clear()
        rows = [u for u in self._ledger.updates(self.run, phase.round, phase.attempt) if u.verdict is Verdict.ACCEPTED]
        state = self._published.state if self._published else None

        def fold() -> Published | Exception:
            try:
                return self._publisher.fold(state, rows)
            except Exception as error:
                log.exception("aggregation failed", run=self.run, round=phase.round)
                return error

        def publish(result: Published | Exception) -> None:
            try:
                self._publish(phase, result, complete=complete)
            except Exception as error:
                self._broken = error
                raise

        self._around.work(fold, publish)

    def _publish(self, phase: phases.Aggregating, result: Published | Exception, *, complete: bool) -> None:
        """Blob first (it is durable already), ledger row second, old blobs go last."""
        if isinstance(result, Exception):
            why = str(result) if isinstance(result, ProtofedError) else type(result).__name__
            self._handle(phases.Broken(f"round {phase.round} could not be aggregated: {why}"))
            return
        self._ledger.publish(self.run, phase.round, phase.attempt, result.address, complete=complete)
        self._published = result
        log.info("round published", run=self.run, round=phase.round, sites=len(phase.sites), complete=complete)
        self._publisher.prune(self._ledger, self.run, phase.round - self._around.keep_rounds)
        self._handle(phases.Aggregated(self._around.clock(), self._scorers()))

    def _tell_scores(self, number: int) -> None:
        of_round = self._ledger.scores(self.run, number).get(number, {})
        means = {name: round(spread.mean, 4) for name, spread in spreads(of_round).items()}
        log.info("round scored", run=self.run, round=number, sites=len(of_round), scores=means)  # names are theirs

    # Small questions

    def _restore(self) -> phases.Phase:
        """The phase that the ledger speaks of; a run that it does not know is begun."""
        known = self._ledger.run(self.run)
        if known is None:
            self._ledger.begin_run(self.run, self.recipe.fingerprint(), self.recipe.wire())
            return phases.Idle(0)
        if known.fingerprint != self.recipe.fingerprint():
            raise StateError(
                f"the state folder holds a run '{self.run}' of another recipe; give the recipe another name, "
                "or the server another state folder"
            )
        rounds = self._ledger.rounds(self.run)
        states = [row.state for row in rounds if row.state]
        self._published = self._publisher.restore(states[-1]) if states else None
        if known.ended_at is not None:
            return phases.Finished(known.reason or "", bool(known.failed))
        if not rounds:
            return phases.Idle(0)
        log.info("run resumed", run=self.run, round=rounds[-1].round)
        self._around.roster.presume()
        tasks = self._ledger.tasks(self.run, rounds[-1].round, rounds[-1].attempt)
        self._tasks = {task.site: task for task in tasks if task.is_open}
        return resumed(rounds[-1], tasks, self._around.clock())

    def _tick_event(self) -> phases.Tick:
        idle, roster = self.recipe.federation.idle_s, self._around.roster
        trainers, evaluators = (roster.alive(role, idle) for role in (Role.TRAINER, Role.EVALUATOR))
        return phases.Tick(self._around.clock(), roster.enrolled(Role.TRAINER), trainers, evaluators)

    def _scorers(self) -> frozenset[SiteId]:
        """Evaluators if there is a global model, and trainers, for their personal ones."""
        tick = self._tick_event()
        return tick.trainers | (tick.evaluators if self._method.global_model else frozenset())

    def _is_open(self, row: TaskRow) -> bool:
        current = self._tasks.get(row.site)
        return current is not None and current.nonce == row.nonce

    def _expected(self, row: TaskRow) -> Expected:
        first = row.kind is TaskKind.INITIALISE or self._published is None
        return NOTHING if first or self._published is None else self._method.expects(self._published.state)

    def _decline(self, row: TaskRow, reason: str) -> None:
        log.warning("site declined", run=self.run, round=row.round, site=row.site, reason=str(reason))
        self._ledger.set_fate(row.nonce, "failed", str(reason))
        del self._tasks[row.site]
        self._handle(phases.Declined(row.site, self._around.clock()))

    def _remaining(self) -> float:
        rules, now = self.recipe.federation, self._around.clock()
        match self._phase:
            case phases.Collecting():
                return max(0.0, self._phase.opened + rules.deadline_s - now)
            case phases.Evaluating():
                return max(0.0, self._phase.opened + rules.score_deadline_s - now)
            case _:
                return 0.0
