"""What the round machine decides, done: invitations, aggregation, publication, for one run and from its ledger."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

import structlog

import protofed.server.methods  # noqa: F401  (registers the server halves)
from protofed.common.errors import ProtofedError, StateError
from protofed.common.payload import SiteId
from protofed.common.recipe import Recipe
from protofed.common.task import Role, TaskKind, Verdict, score_family
from protofed.server import phases
from protofed.server.method import NOTHING, Expected, ServerMethod, server_methods
from protofed.server.overview import spreads
from protofed.server.publisher import Published, Publisher
from protofed.server.resume import resumed
from protofed.server.round import Rules, advance
from protofed.server.rows import RoundRow, TaskRow
from protofed.server.sampling import Uniform
from protofed.server.surroundings import Surroundings

log = structlog.get_logger()


class Driver:
    """Holds a run's phase, newest state and open invitations; every change of them goes through `handle`.

    Raises:
        ConfigError: the recipe names an unknown method or option.
        StateError: the ledger holds another run of this name, or a state that cannot be read.
    """

    def __init__(self, recipe: Recipe, around: Surroundings) -> None:
        self._recipe, self._run = recipe, recipe.name
        self._around, self._ledger = around, around.ledger
        self._method: ServerMethod = server_methods.build(recipe.method.name, recipe.method.options)
        self._rules = Rules(recipe.rounds, recipe.federation, Uniform(recipe.seed))
        self._publisher = Publisher(self._method, around.blobs, recipe.classes)
        self._tasks: dict[SiteId, TaskRow] = {}  # the open invitations
        self._events: deque[phases.Event] = deque()
        self._draining = False
        self._broken: Exception | None = None
        self.published: Published | None = None
        self.phase = self._restore()
        self._republished = isinstance(self.phase, phases.Aggregating)

    def invitation(self, site: SiteId) -> TaskRow | None:
        """The site's open invitation."""
        return self._tasks.get(site)

    def is_open(self, row: TaskRow) -> bool:
        """Whether this very invitation is still open."""
        current = self._tasks.get(row.site)
        return current is not None and current.nonce == row.nonce

    def expected(self, row: TaskRow) -> Expected:
        """What an update that answers the invitation must look like."""
        if row.kind is TaskKind.INITIALISE or self.published is None:
            return NOTHING
        return self._method.expects(self.published.state)

    def started(self, row: TaskRow) -> None:
        """Note that a site works on its invitation."""
        if row.fate == "invited":
            self._tasks[row.site] = replace(row, fate="started")
            self._ledger.set_fate(row.nonce, "started")

    def answered(self, row: TaskRow, event: phases.Event) -> None:
        """Close an invitation and go on from the event that closed it."""
        del self._tasks[row.site]
        self.handle(event)

    def tick(self) -> None:
        """Let time act.

        Raises:
            Exception: what broke the coordinator before; the process has to end and start again from the ledger.
        """
        if self._broken is not None:
            raise self._broken
        if self._republished:  # the last process published a state and died before it said so
            self._republished = False
            self.handle(self._aggregated())
        self.handle(self._tick_event())

    def handle(self, event: phases.Event) -> None:
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
            before = self.phase
            self.phase, effects = advance(self._rules, before, self._events.popleft())
            if isinstance(before, phases.Evaluating) and not isinstance(self.phase, phases.Evaluating):
                self._tasks.clear()  # scores that come now are dropped, and a restart does not wait for them again
                self._ledger.mark_scored(self._run, before.round)
                self._tell_scores(before.round)
            for effect in effects:
                self._perform(effect)
            closed = isinstance(before, phases.Aggregating | phases.Evaluating)
            if closed and isinstance(self.phase, phases.Idle):
                self._events.append(self._tick_event())  # the next round opens now, not at the next tick

    def _perform(self, effect: phases.Effect) -> None:
        match effect:
            case phases.Open(phase):
                self._open(phase)
            case phases.Aggregate(phase, complete):
                self._aggregate(phase, complete=complete)
            case phases.Abandon(round_, attempt, reason):
                log.warning("round abandoned", run=self._run, round=round_, attempt=attempt, reason=reason)
                self._tasks.clear()
                self._ledger.abandon(self._run, round_, attempt, reason)
            case phases.Score(phase):
                attempt = self._ledger.rounds(self._run)[-1].attempt  # the one that gave the model
                self._invite(TaskKind.SCORE, phase.round, attempt, sorted(phase.awaited), self._ledger.invite)
            case phases.Finish(phase):
                log.info("run finished", run=self._run, reason=phase.reason, failed=phase.failed)
                self._tasks.clear()
                self._ledger.end_run(self._run, phase.reason, failed=phase.failed)
                self._around.notify(None)
            case _:
                assert_never(effect)

    def _open(self, phase: phases.Collecting) -> None:
        log.info("round opened", run=self._run, round=phase.round, attempt=phase.attempt, cohort=sorted(phase.cohort))
        row = RoundRow(self._run, phase.round, phase.attempt, phase.size, phase.quorum)
        kind = TaskKind.FIT if phase.round else TaskKind.INITIALISE
        self._invite(kind, phase.round, phase.attempt, sorted(phase.cohort), lambda t: self._ledger.open_round(row, t))

    def _invite(
        self, kind: TaskKind, number: int, attempt: int, sites: list[SiteId], write: Callable[[Sequence[TaskRow]], None]
    ) -> None:
        """Broadcast blobs first, ledger rows second; then the sites are told."""
        state = self.published.state if self.published else None
        sent = self._publisher.broadcasts(state, sites) if state is not None else {}
        rows = []
        for site in sites:
            base, nbytes = sent.get(site, (None, 0))
            rows.append(TaskRow(secrets.token_hex(16), self._run, number, attempt, site, kind, base, nbytes))
        write(rows)
        self._tasks = {row.site: row for row in rows}
        self._around.notify(sites)

    def _aggregate(self, phase: phases.Aggregating, *, complete: bool) -> None:
        self._tasks.clear()
        rows = [u for u in self._ledger.updates(self._run, phase.round, phase.attempt) if u.verdict is Verdict.ACCEPTED]
        state = self.published.state if self.published else None

        def fold() -> Published | Exception:
            try:
                return self._publisher.fold(state, rows)
            except Exception as error:
                log.exception("aggregation failed", run=self._run, round=phase.round)
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
            self.handle(phases.Broken(f"round {phase.round} could not be aggregated: {why}"))
            return
        self._ledger.publish(self._run, phase.round, phase.attempt, result.address, complete=complete)
        self.published = result
        log.info("round published", run=self._run, round=phase.round, sites=len(phase.sites), complete=complete)
        self._publisher.prune(self._ledger, self._run, phase.round - self._around.keep_rounds)
        self.handle(self._aggregated())

    def _tell_scores(self, number: int) -> None:
        of_round = self._ledger.scores(self._run, number).get(number, {})
        told = spreads(of_round).items()
        means = {name: round(spread.mean, 4) for name, spread in told if score_family(name) == name}  # no recalls
        log.info("round scored", run=self._run, round=number, sites=len(of_round), scores=means)  # names are theirs

    def _restore(self) -> phases.Phase:
        """The phase that the ledger speaks of; a run that it does not know is begun."""
        known = self._ledger.run(self._run)
        if known is None:
            self._ledger.begin_run(self._run, self._recipe.fingerprint(), self._recipe.wire())
            return phases.Idle(0)
        if known.fingerprint != self._recipe.fingerprint():
            raise StateError(
                f"the state folder holds a run '{self._run}' of another recipe; give the recipe another name, "
                "or the server another state folder"
            )
        rounds = self._ledger.rounds(self._run)
        states = [row.state for row in rounds if row.state]
        self.published = self._publisher.restore(states[-1]) if states else None
        if known.ended_at is not None:
            return phases.Finished(known.reason or "", bool(known.failed))
        if not rounds:
            return phases.Idle(0)
        log.info("run resumed", run=self._run, round=rounds[-1].round)
        self._around.roster.presume()
        tasks = self._ledger.tasks(self._run, rounds[-1].round, rounds[-1].attempt)
        self._tasks = {task.site: task for task in tasks if task.is_open}
        return resumed(rounds[-1], tasks, self._around.clock())

    def _tick_event(self) -> phases.Tick:
        idle, roster = self._recipe.federation.idle_s, self._around.roster
        trainers, evaluators = (roster.alive(role, idle) for role in (Role.TRAINER, Role.EVALUATOR))
        return phases.Tick(self._around.clock(), roster.enrolled(Role.TRAINER), trainers, evaluators)

    def _aggregated(self) -> phases.Aggregated:
        """With everyone who could score now."""
        tick = self._tick_event()
        evaluators = tick.evaluators if self._method.global_model else phases.NOBODY
        return phases.Aggregated(tick.now, evaluators, tick.trainers)
