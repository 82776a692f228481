"""One run as its sites and its operator see it: tasks, heartbeats, scores; pause, stop, roll-back. Knows no wire.

All methods but those that say otherwise are called from one thread at a time (the server's coordinator thread, a
simulation's only one); aggregation alone runs elsewhere, through `ServerContext.work`. So no method here takes a lock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConflictError, FailureReason, ProtocolError
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import (
    Activity,
    Finished,
    Progress,
    Scores,
    Signal,
    Task,
    TaskKind,
    Wait,
)
from protofed.common.protocol.score_names import ScoreNames
from protofed.server.access.certificates import Certificates
from protofed.server.rounds import phases
from protofed.server.rounds.absence import absences
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.driver import Driver
from protofed.server.rounds.intake import UploadIntake
from protofed.server.rounds.model_warnings import ModelWarning
from protofed.server.rounds.publisher import Published
from protofed.server.rounds.waiting import Waiting
from protofed.server.storage.rows import RoundRow, TaskRow

NOTHING_TO_DO = Wait(retry_after_s=1.0)


class Coordinator:
    """A run, taken up where the ledger says that it stands.

    Raises:
        ConfigError: the recipe names an unknown method or option.
        StateError: the ledger holds another run of this name, or a state that cannot be read.
    """

    def __init__(self, recipe: Recipe, context: ServerContext) -> None:
        self.recipe, self.run = recipe, recipe.name
        self._ledger, self._presence, self._clock = context.ledger, context.presence, context.clock
        self._metrics = context.metrics
        self._driver = Driver(recipe, context)
        self._invitations = self._driver.invitations
        self._taken_up_at = time.time()
        self.intake = UploadIntake(recipe, context, self._driver)
        self._score_names = ScoreNames(recipe.classes, recipe.evaluation.switched_on)
        # Of the attempt, a round and its number, for which it was asked last: by site the newest round that stands.
        self._counted: tuple[tuple[int, int], Mapping[SiteId, int]] = (-1, -1), {}

    @property
    def phase(self) -> phases.Phase:
        """Where the run is."""
        return self._driver.phase

    @property
    def published(self) -> Published | None:
        """The newest state; None before there is a model."""
        return self._driver.published

    @property
    def broken(self) -> Exception | None:
        """What broke the run, also as it ended: the process has to end and start again from the ledger."""
        return self._driver.broken

    @property
    def warnings(self) -> list[ModelWarning]:
        """What speaks against the run's models, as of the last closed round. May be read from any thread."""
        return self._driver.warnings.now

    def deadline_began(self, row: RoundRow) -> float:
        """Since when the deadline of an open round counts, in Unix time: a restart of the server begins it again.

        May be called from any thread.
        """
        return max(row.opened_at, self._taken_up_at)

    def tick(self) -> None:
        """Act on what is due by now: deadlines, sites that went silent, a retry after a full disk.

        Raises:
            Exception: what broke the run earlier; the process has to end and start again from the ledger.
        """
        self._driver.tick()

    def waiting(self, certificates: Certificates) -> Waiting | None:
        """Why the run does not go on; None: it does, or has ended. May be called from any thread."""
        timeout_s = self.recipe.federation.stall_timeout_s
        return self._driver.waiting(lambda: absences(self._presence, certificates, timeout_s))

    # Requests of the operator

    @property
    def paused(self) -> bool:
        """Whether no round is opened."""
        return self._driver.paused

    def stop(self, reason: str) -> None:
        """End the run; sites stop training at their next heartbeat."""
        self._driver.handle(phases.Stop(reason))

    def pause(self, *, paused: bool) -> None:
        """Open no further round, or open them again; an open round goes on to its end."""
        self._driver.pause(paused=paused)

    def roll_back(self, to: int) -> None:
        """Take up the state that a round published.

        Raises:
            ConfigError: the round published no state, its state is no longer kept, or no round would follow it.
            ConflictError: a round is being aggregated now.
        """
        self._driver.roll_back(to)

    def check_regrouping(self) -> None:
        """Check that no secure sum is open, whose groups must stay.

        Raises:
            ConflictError: one is.
        """
        rules = self.recipe.federation
        is_open = isinstance(self.phase, phases.Summing | phases.Aggregating)
        if rules.secure and (is_open or self._driver.waits_for_space):
            raise ConflictError(
                f"run '{self.run}' has a secure sum open at this moment, and its groups must stay to its end; pause "
                f"the run, and try again when it is over (each step takes {rules.sum_step_s:.0f} s at most)"
            )

    def regrouped(self) -> None:
        """Go on with the groups that are left: one was dissolved, while no sum was open."""
        self._driver.regrouped()

    def dismiss(self, site: SiteId, reason: str) -> None:
        """Wait no longer for a site."""
        self._driver.dismiss(site, reason)

    # Requests of sites

    def next_task(self, site: SiteId, instance: str) -> Task | Wait | Finished:
        """The site's open task; Wait if it has none, Finished once the run has ended.

        Asking twice gives the same task: a site that lost the answer, or was restarted, loses nothing.
        """
        self._presence.asks(site, instance)
        if isinstance(self.phase, phases.FinishedPhase):
            return Finished(self.phase.reason, last=True)
        return self.open_task(site) or NOTHING_TO_DO

    def open_task(self, site: SiteId) -> Task | None:
        """The task that `next_task` would give."""
        if (row := self._invitations.of(site)) is None:
            return None
        at, base = (self.run, row.round, row.task_id), (row.base_digest, row.base_bytes)
        counted = self._memory_round(row) if row.kind is TaskKind.FIT else None
        return Task(row.kind, *at, *base, self._remaining(), row.attempt, row.subject, counted)

    def _memory_round(self, row: TaskRow) -> int:
        """The newest round of which the site's memory goes with the state that a fit starts from."""
        if self._counted[0] != (attempt := (row.round, row.attempt)):  # while it is open, nothing is published
            self._counted = attempt, self._ledger.standing_rounds(self.run)
        return self._counted[1].get(row.site, 0)

    def invitation(self, site: SiteId) -> str:
        """The id of the site's open task; empty: it has none. May be called from any thread."""
        row = self._invitations.of(site)
        return "" if row is None else row.task_id

    def may_fetch(self, site: SiteId, address: Digest) -> bool:
        """Whether the site's own open task names this blob. May be called from any thread."""
        row = self._invitations.of(site)
        return row is not None and row.base_digest == address

    def heartbeat(self, site: SiteId, instance: str, progress: Progress) -> Signal:
        """Record a site's progress; ABORT when its task is no longer open.

        The first heartbeat of a task marks it as started; one with a failure declines it. With an idle one this may be
        called from any thread.
        """
        if progress.activity is Activity.IDLE:
            # Without a mark any call counts as life: an idle daemon has no progress that could move.
            self._presence.seen(site, instance)
            return Signal.CONTINUE
        self._presence.seen(site, instance, progress)
        if progress.failure is FailureReason.WITHDRAWN:
            self._presence.leaves(site)  # before its task is closed, which may open the next round
        row = self._invitations.of(site)
        if row is None or row.task_id != progress.task_id:
            return Signal.ABORT
        if progress.failure is not None:
            self._driver.decline(row, progress.failure)
        else:
            self._invitations.started(row)
        return Signal.CONTINUE

    def report_scores(self, site: SiteId, instance: str, task_id: str, scores: Scores) -> None:
        """Record a site's scores, once for each task; scores that come too late are acknowledged and dropped.

        Raises:
            ProtocolError: one of them has a name that this run or the site's role does not have, or a value that no
                score has; none of them counts, and the site is not asked again.
        """
        self._presence.seen(site, instance)
        row = self.intake.invitation(site, task_id, TaskKind.SCORE)
        if not self._invitations.has(row):
            return  # an error would make the daemon retry what can never count
        if problem := self._score_names.problem(scores, self._presence.roles(site)):
            self._metrics.scores_refused()
            self._driver.decline(row, "its scores were refused")
            raise ProtocolError(f"scores refused: {problem}")
        self._ledger.add_scores(row, scores)
        self._driver.answered(row, phases.ScoresArrived(site, self._clock()))

    def _remaining(self) -> float:
        """Seconds until the phase's deadline. A duration, not a time: sites' clocks may differ from ours."""
        rules, now = self.recipe.federation, self._clock()
        match self.phase:
            case phases.Collecting() | phases.Refining():
                return max(0.0, self.phase.opened + rules.deadline_s - now)
            case phases.Summing():
                return max(0.0, self.phase.opened + rules.sum_step_s - now)
            case phases.Evaluating():
                return max(0.0, self.phase.opened + rules.score_deadline_s - now)
            case _:
                return 0.0
