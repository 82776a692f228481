"""A server's runs and their operator, driven by hand: no wire, no time."""

from __future__ import annotations

from dataclasses import dataclass

from tests.server.conftest import Lab, daemon, recipe

from protofed.common.config.recipe import Recipe
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import PROTOCOL_VERSION, Assignment, Finished
from protofed.server.operator.service import OperatorApi, RunReport, SiteReport
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.presence import SitePresence
from protofed.server.rounds.queue import RunQueue
from protofed.server.storage.blobs import MemoryBlobs
from protofed.server.storage.ledger import Ledger


@dataclass
class OperatorLab(Lab):
    """A lab of many runs, with what stands on them.

    Attributes:
        given: recipes that the server is started with; `recipe` plays no part.
    """

    given: tuple[Recipe, ...] = ()

    def restart(self) -> None:
        """Another process takes over the ledger and the blobs; the sites enroll again."""
        self.presence = SitePresence(self.ledger, self.clock)
        context = ServerContext(
            self.ledger, self.blobs, self.presence, self.clock, self.work, self._notify, keep_rounds=self.keep_rounds
        )
        self.metrics = context.metrics
        self.runs = RunQueue(self.given, context)
        self.operation = OperatorApi(self.runs, context)
        for site, role in self.here.items():
            if self.presence.exclusion(site) is None:
                self.presence.enroll(site, {role}, daemon(site))
        self._follow()

    def later(self, seconds: float, alive: tuple[SiteId, ...] = ()) -> None:
        """Time passes; only these sites are heard of before it is noticed."""
        self.clock.now += seconds
        for site in alive:
            self.presence.seen(site, daemon(site))
        self.runs.tick()
        self._follow()

    def start(self, run: str, **tables: object) -> RunReport:
        report = self.operation.start(recipe(run, **tables).model_dump_json())
        self._follow()
        return report

    def come_back(self, site: SiteId) -> Assignment | Finished:
        """A site's daemon enrolls, as over the wire."""
        return self.runs.enroll(site, daemon(site), PROTOCOL_VERSION, "0", "0", {self.here[site]})

    def statuses(self) -> dict[str, str]:
        """Of the runs, in the order of the queue."""
        return {report.row.run: report.status for report in self.operation.runs()}

    def site(self, name: SiteId) -> SiteReport:
        """What the operator sees of a site."""
        (found,) = [report for report in self.operation.sites() if report.site == name]
        return found

    def _follow(self) -> None:
        """The sites turn to the run that goes on; to the last one where none does."""
        if (current := self.runs.current) is not None:
            self.run, self.intake = current, self.runs.intake(current.name)


def operator_lab() -> OperatorLab:
    return OperatorLab(recipe(), MemoryBlobs(), Ledger())
