"""The server's runs: one at a time, in the order in which they were given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protofed.common.errors import ConfigError, ProtocolError, VersionMismatch
from protofed.common.payload import SiteId
from protofed.common.recipe import Recipe
from protofed.common.task import PROTOCOL_VERSION, Assignment, Finished, Progress, Role, Signal, Task, Wait
from protofed.server import phases
from protofed.server.coordinator import Coordinator
from protofed.server.surroundings import Surroundings


class Runs:
    """The run that goes on, and those that wait for it.

    Args:
        recipes: all runs, checked before the first one begins.

    Raises:
        ConfigError: two recipes of one name, or a recipe that cannot be used.
    """

    def __init__(self, recipes: Sequence[Recipe], around: Surroundings) -> None:
        names = [recipe.name for recipe in recipes]
        if len(set(names)) != len(names):
            raise ConfigError(f"two recipes have the same name: {', '.join(names)}; a run's name is used once")
        self._around = around
        self._coordinators = [Coordinator(recipe, around) for recipe in recipes]
        self._told: set[SiteId] = set()

    @property
    def current(self) -> Coordinator:
        """The first run that has not finished, or else the last one."""
        for coordinator in self._coordinators:
            if not isinstance(coordinator.phase, phases.Finished):
                return coordinator
        return self._coordinators[-1]

    @property
    def finished(self) -> bool:
        """Whether no run is left."""
        return isinstance(self.current.phase, phases.Finished)

    @property
    def failed(self) -> list[str]:
        """The runs that failed, with the reason."""
        ends = ((c.run, c.phase) for c in self._coordinators)
        return [f"{run}: {end.reason}" for run, end in ends if isinstance(end, phases.Finished) and end.failed]

    def everyone_was_told(self) -> bool:
        """Whether every site that is alive knows that no run is left."""
        roster, idle = self._around.roster, self.current.recipe.federation.idle_s
        return frozenset().union(*(roster.alive(role, idle) for role in Role)) <= self._told

    def enroll(
        self, site: SiteId, instance: str, protocol: int, software: str, ours: str, roles: Iterable[Role]
    ) -> Assignment | Finished:
        """Enter a daemon and give it the current run.

        Raises:
            VersionMismatch: it speaks another version of the protocol.
        """
        if protocol != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"the client (protofed {software}) speaks protocol {protocol}, this server (protofed {ours}) protocol "
                f"{PROTOCOL_VERSION}; install the same protofed on both"
            )
        self._around.roster.enroll(site, roles, instance)
        if self.finished:
            return self._finished(site, self.current.run)
        self.current.tick()
        return Assignment(self.current.run, self.current.recipe.wire())

    def next_task(self, run: str, site: SiteId, instance: str) -> Task | Wait | Finished:
        """What the site should do now; Finished when its run is over."""
        if run != self.current.run or self.finished:
            self._around.roster.seen(site, instance)
            return self._finished(site, run)
        return self.current.next_task(site, instance)

    def heartbeat(self, run: str, site: SiteId, instance: str, progress: Progress) -> Signal:
        """Note how far a site is."""
        if run != self.current.run:
            self._around.roster.seen(site, instance)
            return Signal.ABORT
        return self.current.heartbeat(site, instance, progress)

    def of(self, run: str) -> Coordinator:
        """The coordinator of a run, finished or not.

        Raises:
            ProtocolError: this server has no such run.
        """
        for coordinator in self._coordinators:
            if coordinator.run == run:
                return coordinator
        raise ProtocolError("no such run on this server; enroll again")

    def _finished(self, site: SiteId, run: str) -> Finished:
        if self.finished:
            self._told.add(site)
        ends = [c.phase.reason for c in self._coordinators if c.run == run and isinstance(c.phase, phases.Finished)]
        return Finished(ends[0] if ends else "completed", last=self.finished)
