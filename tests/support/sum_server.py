"""The server's half of one secure sum by hand: from what sites uploaded, each step's blob, and the sum in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protofed.common import codec
from protofed.common.payload import Array, Payload, SiteId
from protofed.common.protocol.messages import TaskKind
from protofed.common.protocol.sum_messages import (
    HoldersMessage,
    RosterMessage,
    SharesMessage,
    SignatureMessage,
    SurvivorsMessage,
    message_of,
    payload_of,
)
from protofed.common.secure_sums import masking
from protofed.common.secure_sums.context import SumContext, Vector
from protofed.common.secure_sums.keys import KeyAdvert, Roster
from protofed.common.secure_sums.masking import Masks, Revealed

STEPS = (
    TaskKind.SHARE,
    TaskKind.HOLDERS,
    TaskKind.AGREE_HOLDERS,
    TaskKind.REVEAL_HOLDERS,
    TaskKind.MASK,
    TaskKind.AGREE,
    TaskKind.REVEAL,
)
ROWS = (TaskKind.HOLDERS, TaskKind.AGREE_HOLDERS, TaskKind.REVEAL_HOLDERS)


def steps_of(context: SumContext) -> list[TaskKind]:
    """The steps of a sum behind the adverts."""
    return [step for step in STEPS if Vector.HOLDERS in context.vectors or step not in ROWS]


@dataclass
class SumServer:
    """Keeps what sites uploaded, by step and site; `blob` gives what one is sent for the next step."""

    context: SumContext
    uploads: dict[TaskKind, dict[SiteId, bytes]] = field(default_factory=dict)

    def take(self, step: TaskKind, site: SiteId, data: bytes) -> None:
        """An upload was accepted; adverts come with FIT or SCORE_SUM."""
        self.uploads.setdefault(step, {})[site] = data

    def blob(self, step: TaskKind, site: SiteId) -> bytes:
        """What a site is sent for a step."""
        return codec.encode(self._content(step, site))

    @property
    def roster(self) -> Roster:
        """Of the adverts that came."""
        adverts = self.uploads.get(TaskKind.FIT) or self.uploads[TaskKind.SCORE_SUM]
        return Roster(self.context, tuple(message_of(adverts[site], KeyAdvert)[0] for site in sorted(adverts)))

    def total(self) -> Array:
        """The sum of the survivors' values."""
        return self._opened_sum(Vector.VALUES)

    def counts(self) -> Array:
        """How many hold each row."""
        return self._opened_sum(Vector.HOLDERS)

    def survivors(self, vector: Vector) -> tuple[SiteId, ...]:
        """Whose masked vectors came."""
        return tuple(sorted(self.uploads[TaskKind.MASK if vector is Vector.VALUES else TaskKind.HOLDERS]))

    def _content(self, step: TaskKind, site: SiteId) -> Payload:
        match step:
            case TaskKind.SHARE:
                return payload_of(RosterMessage(self.roster.adverts))
            case TaskKind.MASK if Vector.HOLDERS in self.context.vectors:
                return payload_of(self._holders())
            case TaskKind.HOLDERS | TaskKind.MASK:
                dealt = {other: self._read(TaskKind.SHARE, other, SharesMessage).sealed for other in self._sharers()}
                return payload_of(SharesMessage({other: dealt[other][site] for other in dealt if other != site}))
            case TaskKind.AGREE_HOLDERS | TaskKind.AGREE:
                return payload_of(SurvivorsMessage(self.survivors(vector_of(step)), {}))
            case TaskKind.REVEAL_HOLDERS | TaskKind.REVEAL:
                signed = TaskKind.AGREE if step is TaskKind.REVEAL else TaskKind.AGREE_HOLDERS
                signatures = {by: self._read(signed, by, SignatureMessage).signature for by in self.uploads[signed]}
                return payload_of(SurvivorsMessage(self.survivors(vector_of(step)), signatures))
            case _:
                raise AssertionError(step)

    def _sharers(self) -> Sequence[SiteId]:
        return sorted(self.uploads[TaskKind.SHARE])

    def _masks(self, vector: Vector) -> Masks:
        rows = vector is Vector.VALUES and Vector.HOLDERS in self.context.vectors
        return Masks(self.roster, vector, self.survivors(Vector.HOLDERS) if rows else tuple(self._sharers()))

    def _vectors(self, step: TaskKind) -> Mapping[SiteId, Array]:
        vectors = {}
        for site, data in sorted(self.uploads[step].items()):
            vector = message_of(data, SignatureMessage)[1]
            assert vector is not None
            vectors[site] = vector
        return vectors

    def _seeds(self, vector: Vector) -> masking.Opened:
        step = TaskKind.REVEAL if vector is Vector.VALUES else TaskKind.REVEAL_HOLDERS
        told = {site: self._read(step, site, Revealed) for site in self.uploads[step]}
        return masking.opened(self._masks(vector), self.survivors(vector), told)

    def _opened_sum(self, vector: Vector) -> Array:
        step = TaskKind.MASK if vector is Vector.VALUES else TaskKind.HOLDERS
        alive, sent = self.survivors(vector), self._vectors(step)
        return masking.unmasked(self._masks(vector), alive, sent.values(), self._seeds(vector))

    def _holders(self) -> HoldersMessage:
        alive = self.survivors(Vector.HOLDERS)
        signatures = {site: self._read(TaskKind.HOLDERS, site, SignatureMessage).signature for site in alive}
        return HoldersMessage(self._vectors(TaskKind.HOLDERS), signatures, self._seeds(Vector.HOLDERS))

    def _read(self, step: TaskKind, site: SiteId, kind: Any) -> Any:
        return message_of(self.uploads[step][site], kind)[0]


def vector_of(step: TaskKind) -> Vector:
    """The vector that a step is about."""
    return Vector.HOLDERS if step in ROWS else Vector.VALUES
