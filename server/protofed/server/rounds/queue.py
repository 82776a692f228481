"""The server's runs: one at a time, in the order in which the ledger has them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import structlog

from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import (
    ConfigError,
    ConflictError,
    DiskFailureError,
    NotEnrolledError,
    OutOfSpaceError,
    ProtocolError,
    StateError,
    VersionMismatchError,
)
from protofed.common.payload import SiteId
from protofed.common.protocol.consortium import Consortium, Member
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
from protofed.common.secure_aggregation.groups import Group
from protofed.server.access.certificates import Certificates
from protofed.server.rounds.context import ServerContext, check_same, read_recipe
from protofed.server.rounds.intake.intake import NOTHING_TO_DO, Intake
from protofed.server.rounds.machine import phases
from protofed.server.rounds.machine.rules import check_model, min_cohort
from protofed.server.rounds.machine.waiting import Waiting, WaitReason
from protofed.server.rounds.presence import NO_MEMBER
from protofed.server.rounds.run import Run
from protofed.server.rounds.secure_aggregation.partners import PartnerList
from protofed.server.storage.rows import RunRow
from protofed.server.verdicts import EXCLUDED, RoundOutcome

log = structlog.get_logger()
NO_RUN = "no run is queued"
# Up to so many, each that enrolls may open the round at once; of more, the timer's next tick looks at all together.
FEW_SITES = 100


class RunQueue:
    """The current run, those that wait for it, and those that have ended.

    After a restart a run continues from the ledger. If it cannot (its state is damaged, or its method unknown to this
    version), it ends FAILED with the reason. So the runs behind it are not blocked for ever.

    Args:
        recipes: runs to queue, if the ledger does not know them yet; all are checked before the first one begins.

    Raises:
        ConfigError: two recipes of one name, or a recipe that cannot be used.
        StateError: the ledger holds a run of that name with another recipe. Or disk, memory or file handles do not
            suffice to take a run up.
    """

    def __init__(self, recipes: Sequence[Recipe], context: ServerContext) -> None:
        names = [recipe.name for recipe in recipes]
        if len(set(names)) != len(names):
            raise ConfigError(f"two recipes have the same name: {', '.join(names)}; a run's name is used once")
        self._context, self._ledger = context, context.ledger
        self.partners = PartnerList(context.ledger, context.presence)
        self._live: dict[str, Run] = {}  # those that have not ended, and those that ended in this process
        self._intakes: dict[str, Intake] = {}  # theirs
        self._informed: set[SiteId] = set()  # sites that know that no run is left
        self._reportable = set(names)  # runs that `failed` speaks of
        known = {row.run: row for row in self._ledger.runs()}
        for recipe in recipes:
            if recipe.name in known:
                check_same(recipe, known[recipe.name])
            elif not context.simulated:
                check_model(recipe)
        unended = [row for row in known.values() if row.outcome is None]
        if any(self._ledger.newest(row.run) is not None for row in unended):
            context.presence.presume()  # only now: later it would forget the daemons that have enrolled
        for row in unended:
            if self._take_up(row):
                context.metrics.run_recovered()
        for recipe in recipes:
            if recipe.name not in known:
                self.start(recipe)

    @property
    def current(self) -> Run | None:
        """The run that is going on; None if all have ended. May be called from any thread."""
        # A copy: the coordinator's thread may add a run meanwhile.
        return next((run for run in list(self._live.values()) if not _has_ended(run)), None)

    @property
    def stall_timeout_s(self) -> float:
        """Seconds without progress after which a site counts as silent; infinite while no run waits for any site."""
        return math.inf if (current := self.current) is None else current.recipe.federation.stall_timeout_s

    @property
    def finished(self) -> bool:
        """Whether no run is left. One that broke as it ended is: the ledger may not have its end."""
        return self.current is None and self._broken is None

    @property
    def _broken(self) -> Exception | None:
        return next((run.broken for run in list(self._live.values()) if run.broken is not None), None)

    @property
    def failed(self) -> list[str]:
        """`run: reason` of each failed run among those that this process was given or took up."""
        return [f"{row.run}: {row.reason}" for row in self._ledger.runs() if row.failed and row.run in self._reportable]

    def tick(self) -> None:
        """Act on what is due in the current run, and free the states of runs that have ended.

        Raises:
            Exception: what broke a run earlier, also one that has ended; the process has to end and start again.
        """
        if (broken := self._broken) is not None:
            raise broken
        if (current := self.current) is not None:
            current.tick()
        ended = [name for name, run in self._live.items() if _has_ended(run)]
        for name in ended[:-1] if self.current is None else ended:
            del self._live[name]  # and with it a decoded model; `of` makes it again from the ledger
            del self._intakes[name]

    def waiting(self, run: str, certificates: Certificates) -> Waiting | None:
        """Why a run does not go on; None: it does, has ended, or is not known."""
        if (known := self._live.get(run)) is None or isinstance(known.phase, phases.FinishedPhase):
            return None
        current = self.current
        if current is not None and current.name != run:
            return Waiting(WaitReason.QUEUED, known.phase.round, behind=current.name)
        return known.waiting(certificates)

    # Requests of sites

    def all_informed(self) -> bool:
        """Whether every site that is alive knows that no run is left: a server `--until-finished` may end."""
        timeout_s = max((run.recipe.federation.stall_timeout_s for run in self._live.values()), default=0.0)
        return frozenset().union(*(self._context.presence.alive(role, timeout_s) for role in Role)) <= self._informed

    def enroll(
        self,
        site: SiteId,
        instance: str,
        protocol: int,
        software: str,
        server_software: str,
        roles: Iterable[Role],
        pause_reason: PauseReason = PauseReason.NONE,
        member: Member = NO_MEMBER,
    ) -> Assignment | Finished:
        """Register a daemon and give it the current run. A round does not wait for one that has a pause reason.

        Raises:
            VersionMismatchError: it speaks another version of the protocol.
            ExcludedError: the operator keeps the site out.
        """
        if protocol != PROTOCOL_VERSION:
            raise VersionMismatchError(
                f"the client (protofed {software}) speaks protocol {protocol}, this server (protofed "
                f"{server_software}) protocol {PROTOCOL_VERSION}; install the same protofed on both"
            )
        self._context.presence.enroll(site, roles, instance, pause_reason, member)
        return self._offered(site)

    def offer(self, site: SiteId, instance: str) -> Assignment | Finished:
        """As `enroll`, for a daemon that has enrolled and still waits for a run.

        Raises:
            FencedError: a newer daemon of the site has enrolled in the meantime.
            ExcludedError, NotEnrolledError: the operator keeps the site out, or has forgotten it.
        """
        self._context.presence.seen(site, instance)
        return self._offered(site)

    def _offered(self, site: SiteId) -> Assignment | Finished:
        """The current run for a site that has just called."""
        presence = self._context.presence
        if (current := self.current) is None:
            return self._finished(site)
        if self._lacks_partners(site, current):
            presence.hold(site, PauseReason.PARTNERS)
        if (pause_reason := presence.pause_reason(site)) is not PauseReason.NONE:
            current.dismiss(site, pause_reason.value)
        if isinstance(current.phase, phases.Idle) and len(presence) <= FEW_SITES:
            current.tick()
        recipe = current.recipe
        cohort = min_cohort(recipe.federation)
        return Assignment(current.name, recipe.wire(), self._context.keep_rounds, recipe.preprocessing_digest(), cohort)

    def _lacks_partners(self, site: SiteId, run: Run) -> bool:
        """Whether a trainer's update could be aggregated with nobody's: its people confirmed another list."""
        trains = Role.TRAINER in self._context.presence.roles(site)
        return run.recipe.federation.secure and trains and not self.partners.admits(site)

    def next_task(self, run: str, site: SiteId, instance: str) -> Task | Wait | Finished:
        """The site's open task in this run; Finished once the run is over."""
        current = self.current
        if current is None or run != current.name:
            self._context.presence.seen(site, instance)
            return self._finished(site, run)
        return self.intake(run).next_task(site, instance)

    def idle(self, run: str, site: SiteId, instance: str) -> Wait | None:
        """What `next_task` answers a site that has nothing to do; None: ask that. May be called from any thread.

        Raises:
            As `next_task`.
        """
        current = self.current
        if current is None or run != current.name or current.invitations.of(site):
            return None
        self._context.presence.asks(site, instance)
        return NOTHING_TO_DO

    def heartbeat(self, run: str, site: SiteId, instance: str, progress: Progress) -> Signal:
        """Record a site's progress; ABORT if the site is excluded or nobody waits for its task.

        An idle one may be called from any thread: it changes the site's presence alone.

        Raises:
            FencedError: a newer daemon of the site has enrolled.
            NotEnrolledError: it has not enrolled, and its task, if it has one, is waited for.
        """
        if self._context.presence.exclusion(site) is not None:
            return Signal.ABORT
        current = self.current
        try:
            # Not `intake`, which may read the ledger: an idle site's call is on another thread.
            intake = None if current is None or run != current.name else self._intakes.get(run)
            if intake is None:
                self._context.presence.seen(site, instance)
                signal = Signal.ABORT
            else:
                signal = intake.heartbeat(site, instance, progress)
        except NotEnrolledError:
            # A daemon in a fit from before a restart enrolls at its end, which the ABORT of a closed task brings about.
            if progress.task_id in ("", self.invitation(site)):
                raise
            signal = Signal.ABORT
        self._context.presence.note(site, progress)
        return signal

    def invitation(self, site: SiteId) -> str:
        """The id of the site's open task in the current run; empty: it has none. May be called from any thread."""
        current = self.current
        return "" if current is None or (row := current.invitations.of(site)) is None else row.task_id

    def may_fetch(self, run: str, site: SiteId, address: Digest) -> bool:
        """Whether the site's own open task names this blob. May be called from any thread."""
        current = self.current
        return current is not None and current.name == run and current.invitations.may_fetch(site, address)

    def named(self, among: Collection[Digest]) -> set[Digest]:
        """The given digests whose blobs a row of the ledger names."""
        return self._ledger.named(among)

    def intake(self, run: str) -> Intake:
        """What takes the calls of a run's sites.

        Raises:
            ProtocolError: this server has no such run.
        """
        self.of(run)
        return self._intakes[run]

    def of(self, run: str) -> Run:
        """A run, ended or not.

        Raises:
            ProtocolError: this server has no such run.
        """
        if run not in self._live:
            row = self._ledger.run(run)
            if row is None:
                raise ProtocolError(f"no such run '{run}' on this server; enroll again")
            self._open(read_recipe(row))
        return self._live[run]

    # Requests of the operator

    def start(self, recipe: Recipe) -> None:
        """Queue a run.

        Raises:
            ConfigError: the recipe cannot be used.
            ConflictError: there is a run of this name.
        """
        if self._ledger.run(recipe.name) is not None:
            raise ConflictError(f"there is a run '{recipe.name}' already; give the recipe another name, or --name")
        try:
            self._open(recipe)
        except OutOfSpaceError:
            if (row := self._ledger.run(recipe.name)) is not None:  # it is queued, and only the journal lacks it yet
                self._take_up(row)
            raise
        self._reportable.add(recipe.name)
        self._informed.clear()
        log.info("run queued", run=recipe.name)
        self._context.notify(None)

    def roll_back(self, run: str, to: int) -> None:
        """Go on with a run from the state that a round published; one that had ended is queued again, as the last one.

        Raises:
            ConfigError: that round published none, its state is no longer kept, or no round would follow it.
            ConflictError: a round is being aggregated now.
        """
        ended = _has_ended(known := self.of(run))
        known.roll_back(to)
        if ended:
            self._live[run] = self._live.pop(run)  # to the end of the queue: a run that goes on is not interrupted
            self._informed.clear()

    def exclude(self, site: SiteId, reason: str) -> None:
        """Refuse a site from now on; the open round goes on without it."""
        self._context.presence.exclude(site, reason)
        if (current := self.current) is not None:
            current.dismiss(site, f"{EXCLUDED}{reason}")
        log.warning("site excluded", site=site, reason=reason)

    def forget(self, site: SiteId) -> None:
        """Remove a site that is gone from the known ones; the open round goes on without it."""
        self._context.presence.erase(site)
        if (current := self.current) is not None:
            current.dismiss(site, "forgotten by the operator")
        log.warning("site forgotten", site=site)

    def regroup(self, group: Group) -> None:
        """Dissolve a group of secure aggregation: its sites are newcomers in all runs.

        Raises:
            ConflictError: a secure aggregation is open.
        """
        for run in self._live.values():
            run.check_regrouping()
        self._ledger.dissolve(group)
        for run in self._live.values():
            run.regrouped()
        log.warning("group of sites dissolved", sites=list(group))

    def offer_partners(self, document: str) -> Consortium:
        """Offer a list of partners; groups with a site that it lacks are dissolved, and open rounds go on without it.

        Raises:
            ConfigError, ConflictError: as of `PartnerList.checked`; or an aggregation is open while a group must end.
        """
        listed = self.partners.checked(document)
        for group in self._ledger.groups():
            if not listed.identities.keys() >= set(group):
                self.regroup(group)
        self.partners.offer(listed)
        current, presence = self.current, self._context.presence
        for site in sorted(presence.enrolled(Role.TRAINER)):
            if current is not None and self._lacks_partners(site, current):
                presence.forget(site)  # it enrolls again, and is given the list
                current.dismiss(site, PauseReason.PARTNERS.value)
        self._context.notify(None)
        log.info("list of partners offered", number=listed.number, digest=listed.digest)
        return listed

    def admit(self, site: SiteId) -> None:
        """Allow an excluded site to enroll again."""
        self._context.presence.admit(site)
        log.info("site admitted", site=site)

    def _open(self, recipe: Recipe) -> None:
        run = Run(recipe, self._context)
        self._intakes[run.name] = Intake(run, self._context)
        self._live[run.name] = run

    def _take_up(self, row: RunRow) -> bool:
        """Continue a run from its ledger rows, or end it FAILED; True if it continues.

        Raises:
            OutOfSpaceError, DiskFailureError: this machine's fault; nothing is recorded about the run. The server ends,
                and its next start takes the run up.
        """
        self._reportable.add(row.run)
        try:
            self._open(read_recipe(row))
        except (OutOfSpaceError, DiskFailureError):
            raise
        except (ConfigError, StateError) as error:
            log.error("run cannot be taken up again", run=row.run, why=str(error))
            remedy = f"restore it, or `protofed runs rollback {row.run}` to an earlier round"
            self._ledger.end_run(row.run, f"it could not be taken up again: {error}; {remedy}", RoundOutcome.FAILED)
            return False
        return True

    def _finished(self, site: SiteId, run: str = "") -> Finished:
        if self.finished:
            self._informed.add(site)
        return Finished(self._reason(run or next(reversed(self._live), "")), last=self.finished)

    def _reason(self, run: str) -> str:
        """Why a run has ended; only of one that ended long ago does the ledger have to be asked."""
        known = self._live.get(run)
        if known is not None and isinstance(known.phase, phases.FinishedPhase):
            return known.phase.reason or "completed"
        row = self._ledger.run(run) if run else None
        return NO_RUN if row is None else row.reason or "completed"


def _has_ended(run: Run) -> bool:
    return isinstance(run.phase, phases.FinishedPhase)
