"""The server's half of one secure aggregation, with sites' uploads given by hand: its results are the server's."""

from __future__ import annotations

from dataclasses import dataclass, field

from protofed.common import codec
from protofed.common.payload import Array, SiteId
from protofed.common.protocol.messages import CONTRIBUTORS_STEPS, SUM_STEPS, TaskKind
from protofed.common.secure_aggregation.groups import Groups
from protofed.common.secure_aggregation.keys import Roster, SumContext, Vector
from protofed.common.secure_aggregation.masking import counted
from protofed.common.secure_aggregation.messages import ContributorsMessage, unpack
from protofed.server.rounds.secure_aggregation.steps import SumRecord


def steps_of(context: SumContext) -> list[TaskKind]:
    """The steps of a sum behind the adverts."""
    return [step for step in SUM_STEPS if Vector.CONTRIBUTORS in context.vectors or step not in CONTRIBUTORS_STEPS]


@dataclass
class SumServer:
    """Keeps what sites uploaded, by step and site; `blob` gives what one is sent for the next step.

    Attributes:
        groups: of the run's sites.
    """

    context: SumContext
    groups: Groups
    uploads: dict[TaskKind, dict[SiteId, bytes]] = field(default_factory=dict)

    def take(self, step: TaskKind, site: SiteId, data: bytes) -> None:
        """An upload was accepted; adverts come with FIT."""
        self.uploads.setdefault(step, {})[site] = data

    def blob(self, step: TaskKind, site: SiteId) -> bytes:
        """What a site is sent for a step."""
        return codec.encode(self._record.bases(step, [site])[site])

    @property
    def roster(self) -> Roster:
        return self._record.roster

    def total(self) -> Array:
        """The sum of the survivors' values."""
        return self._record.total()

    def counts(self) -> Array:
        alive = self._record.survivors(Vector.CONTRIBUTORS)
        told, _ = unpack(self.blob(TaskKind.MASK, alive[0]), ContributorsMessage)
        return counted(self._record.masks(Vector.CONTRIBUTORS), alive, told.vectors, told.signatures, told.seeds)

    @property
    def _record(self) -> SumRecord:
        blobs = {codec.digest(data): data for of_step in self.uploads.values() for data in of_step.values()}
        digests = {
            step: {site: codec.digest(data) for site, data in of_step.items()} for step, of_step in self.uploads.items()
        }
        return SumRecord(self.context, digests, blobs.__getitem__, self.groups)
