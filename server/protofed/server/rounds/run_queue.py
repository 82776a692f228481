"""The server's runs: one at a time, in the order of the queue, which is the ledger's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import structlog

from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import (
    ConfigError,
    ConflictError,
    OutOfSpaceError,
    ProtocolError,
    StateError,
    VersionMismatchError,
)
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import (
    PROTOCOL_VERSION,
    Assignment,
    Finished,
    PauseReason,
    Progress,
    Role,
    Signal,
    Task,
    Wait,
)
from protofed.server.rounds import phases
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.coordinator import Coordinator
from protofed.server.rounds.resume import check_same, recipe_of
from protofed.server.storage.rows import RunRow
from protofed.server.verdicts import RoundOutcome

log = structlog.get_logger()
NO_RUN = "no run is queued"


class RunQueue:
    """The run that goes on, those that wait for it, and those that have ended.

    A run that was begun before a restart goes on from the ledger. One that cannot be taken up again, because its state
    is damaged or its method is not known to this version, ends FAILED with the reason: none goes on for ever.

    Args:
        recipes: runs to queue, if the ledger does not know them yet; all are checked before the first one begins.

    Raises:
        ConfigError: two recipes of one name, or a recipe that cannot be used.
        StateError: the ledger holds a run of that name with another recipe.
    """

    def __init__(self, recipes: Sequence[Recipe], context: ServerContext) -> None:
        names = [recipe.name for recipe in recipes]
        if len(set(names)) != len(names):
            raise ConfigError(f"two recipes have the same name: {', '.join(names)}; a run's name is used once")
        self._context, self._ledger = context, context.ledger
        self._live: dict[str, Coordinator] = {}  # those that have not ended, and those that ended in this process
        self._told: set[SiteId] = set()
        self._asked = set(names)  # the runs of which `failed` tells
        known = {row.run: row for row in self._ledger.runs()}
        for recipe in recipes:
            if recipe.name in known:
                check_same(recipe, known[recipe.name])
        for row in known.values():
            if row.outcome is None and self._take_up(row):
                context.metrics.recovered()
        for recipe in recipes:
            if recipe.name not in known:
                self.start(recipe)

    @property
    def current(self) -> Coordinator | None:
        """The run that goes on."""
        for coordinator in list(self._live.values()):  # asked from any thread
            if not isinstance(coordinator.phase, phases.FinishedPhase):
                return coordinator
        return None

    @property
    def finished(self) -> bool:
        """Whether no run is left."""
        return self.current is None

    @property
    def failed(self) -> list[str]:
        """Of the runs that this process was given or took up: those that failed, with the reason."""
        return [f"{row.run}: {row.reason}" for row in self._ledger.runs() if row.failed and row.run in self._asked]

    def tick(self) -> None:
        """Let time act on the run that goes on."""
        if (current := self.current) is not None:
            current.tick()
        ended = [run for run, coordinator in self._live.items() if isinstance(coordinator.phase, phases.FinishedPhase)]
        for run in ended[:-1] if self.current is None else ended:
            del self._live[run]  # with its last state

    # What sites ask for

    def everyone_was_told(self) -> bool:
        """Whether every site that is alive knows that no run is left."""
        idle = max((c.recipe.federation.stall_timeout_s for c in self._live.values()), default=0.0)
        return frozenset().union(*(self._context.presence.alive(role, idle) for role in Role)) <= self._told

    def enroll(
        self,
        site: SiteId,
        instance: str,
        protocol: int,
        software: str,
        ours: str,
        roles: Iterable[Role],
        hold: PauseReason = PauseReason.NONE,
    ) -> Assignment | Finished:
        """Enter a daemon and give it the current run. Nobody waits for one that says why it takes no task.

        Raises:
            VersionMismatch: it speaks another version of the protocol.
            Excluded: the operator keeps the site out.
        """
        if protocol != PROTOCOL_VERSION:
            raise VersionMismatchError(
                f"the client (protofed {software}) speaks protocol {protocol}, this server (protofed {ours}) protocol "
                f"{PROTOCOL_VERSION}; install the same protofed on both"
            )
        self._context.presence.enroll(site, roles, instance, hold)
        if (current := self.current) is None:
            return self._finished(site)
        if hold is not PauseReason.NONE:
            current.dismiss(site, hold.value)
        current.tick()
        recipe = current.recipe
        return Assignment(current.run, recipe.wire(), self._context.keep_rounds, recipe.preprocessing_digest())

    def next_task(self, run: str, site: SiteId, instance: str) -> Task | Wait | Finished:
        """What the site should do now; Finished when its run is over."""
        current = self.current
        if current is None or run != current.run:
            self._context.presence.seen(site, instance)
            return self._finished(site, run)
        return current.next_task(site, instance)

    def heartbeat(self, run: str, site: SiteId, instance: str, progress: Progress) -> Signal:
        """Note how far a site is; an excluded one stops what it does."""
        if self._context.presence.exclusion(site) is not None:
            return Signal.ABORT
        current = self.current
        if current is None or run != current.run:
            self._context.presence.seen(site, instance)
            signal = Signal.ABORT
        else:
            signal = current.heartbeat(site, instance, progress)
        self._context.presence.note(site, progress)
        return signal

    def may_fetch(self, run: str, site: SiteId, address: Digest) -> bool:
        """Whether the site's own open task names this blob; asked from any thread."""
        current = self.current
        return current is not None and current.run == run and current.may_fetch(site, address)

    def of(self, run: str) -> Coordinator:
        """The coordinator of a run, ended or not.

        Raises:
            ProtocolError: this server has no such run.
        """
        if run not in self._live:
            row = self._ledger.run(run)
            if row is None:
                raise ProtocolError(f"no such run '{run}' on this server; enroll again")
            self._live[run] = Coordinator(recipe_of(row), self._context)
        return self._live[run]

    # What the operator asks for

    def start(self, recipe: Recipe) -> None:
        """Queue a run.

        Raises:
            ConfigError: the recipe cannot be used.
            Conflict: there is a run of this name.
        """
        if self._ledger.run(recipe.name) is not None:
            raise ConflictError(f"there is a run '{recipe.name}' already; give the recipe another name")
        try:
            self._live[recipe.name] = Coordinator(recipe, self._context)
        except OutOfSpaceError:
            if (row := self._ledger.run(recipe.name)) is not None:  # it is queued; only the journal lacks it yet
                self._take_up(row)
            raise
        self._asked.add(recipe.name)
        self._told.clear()
        log.info("run queued", run=recipe.name)
        self._context.notify(None)

    def abort(self, run: str, reason: str) -> None:
        """End a run that goes on or waits.

        Raises:
            Conflict: it has ended.
        """
        self._going_on(run).stop(reason)

    def pause(self, run: str, *, paused: bool) -> None:
        """Open no round of a run, or do again.

        Raises:
            Conflict: it has ended.
        """
        self._going_on(run).pause(paused=paused)

    def roll_back(self, run: str, to: int) -> None:
        """Go on with a run from the state that a round published; one that had ended is queued again, as the last one.

        Raises:
            ConfigError: that round published none, or its state is no longer kept.
            Conflict: a round is being aggregated at this moment.
        """
        coordinator = self.of(run)
        ended = isinstance(coordinator.phase, phases.FinishedPhase)
        coordinator.roll_back(to)
        if ended:
            self._live[run] = self._live.pop(run)
            self._told.clear()

    def exclude(self, site: SiteId, reason: str) -> None:
        """Keep a site out from now on; nobody waits for it any more."""
        self._context.presence.exclude(site, reason)
        if (current := self.current) is not None:
            current.dismiss(site, f"excluded: {reason}")
        log.warning("site excluded", site=site, reason=reason)

    def admit(self, site: SiteId) -> None:
        """Let an excluded site in again."""
        self._context.presence.admit(site)
        log.info("site admitted", site=site)

    def _going_on(self, run: str) -> Coordinator:
        coordinator = self.of(run)
        if isinstance(coordinator.phase, phases.FinishedPhase):
            raise ConflictError(f"run '{run}' has ended: {coordinator.phase.reason}")
        return coordinator

    def _take_up(self, row: RunRow) -> bool:
        """Go on with a run from its ledger, or end it FAILED; whether it goes on."""
        self._asked.add(row.run)
        try:
            self._live[row.run] = Coordinator(recipe_of(row), self._context)
        except (ConfigError, StateError) as error:
            log.exception("run cannot be taken up again", run=row.run)
            remedy = f"restore it, or `protofed runs rollback {row.run}` to an earlier round"
            self._ledger.end_run(row.run, f"it could not be taken up again: {error}; {remedy}", RoundOutcome.FAILED)
            return False
        return True

    def _finished(self, site: SiteId, run: str = "") -> Finished:
        if self.finished:
            self._told.add(site)
        row = self._ledger.run(run or next(reversed(self._live), ""))
        return Finished(NO_RUN if row is None else row.reason or "completed", last=self.finished)
