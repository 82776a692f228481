"""Sites of secure aggregation in memory, one object a site: they answer each task of a server as an agent does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from tests.common.secure_aggregation.parties import Party

from protofed.common.codec import Buffer, Digest
from protofed.common.payload import Array, Payload, SiteId
from protofed.common.protocol.messages import Task, TaskKind
from protofed.common.secure_aggregation import masking
from protofed.common.secure_aggregation.keys import Roster, SumContext, Vector
from protofed.common.secure_aggregation.masking import Masks, counted, masked, signed_vector
from protofed.common.secure_aggregation.messages import (
    ContributorsMessage,
    RosterMessage,
    SharesMessage,
    SignatureMessage,
    SurvivorsMessage,
    pack,
    unpack,
)


@dataclass
class SumSite:
    """One site.

    Attributes:
        recipe: the run's fingerprint.
        read: gives a blob that the server has.
        flags: which classes it holds, [R] uint64; None: the method sums nothing by class.
        numbers: its words [N] uint64, with only the classes [R] bool that enough sites hold; None: with all.
    """

    site: SiteId
    recipe: Digest
    read: Callable[[Digest], Buffer]
    flags: Array | None
    numbers: Callable[[Array | None], Array]
    fewest: int = 2
    sent: dict[str, Payload] = field(default_factory=dict)  # by task_id

    def answer(self, task: Task) -> Payload:
        """What it uploads; the same for a task that it has answered."""
        if task.task_id not in self.sent:
            self.sent[task.task_id] = self._answered(task)
        return self.sent[task.task_id]

    def _answered(self, task: Task) -> Payload:
        assert task.base_digest is not None
        if task.kind in (TaskKind.FIT, TaskKind.SCORE_SUM):
            assert task.sum_of is not None
            vectors = (Vector.VALUES,) if self.flags is None else (Vector.CONTRIBUTORS, Vector.VALUES)
            at = task.run, task.round, task.attempt, task.sum_of
            self.party = Party(self.site, SumContext(*at, self.recipe, task.base_digest, vectors))
            return pack(self.party.advert())
        base = self.read(task.base_digest)
        match task.kind:
            case TaskKind.SHARE:
                told, _ = unpack(base, RosterMessage)
                self.roster = Roster(self.party.context, told.adverts, told.groups)
                return pack(SharesMessage(self.party.deal(self.roster)))
            case TaskKind.CONTRIBUTORS:
                masks = self._take(base, Vector.CONTRIBUTORS)
                assert self.flags is not None
                vector = masked(masks, self.party.secrets, self.flags)
                return pack(SignatureMessage(signed_vector(masks, vector, self.party.identity)), vector)
            case TaskKind.MASK if self.flags is None:
                return self._masked(self._take(base, Vector.VALUES), None)
            case TaskKind.MASK:
                flagged, _ = unpack(base, ContributorsMessage)
                alive = tuple(flagged.vectors)
                counts = counted(self.contributors, alive, flagged.vectors, flagged.signatures, flagged.seeds)
                return self._masked(Masks(self.roster, Vector.VALUES, alive), counts >= self.fewest)
            case TaskKind.AGREE_CONTRIBUTORS | TaskKind.AGREE:
                alive = unpack(base, SurvivorsMessage)[0].sites
                return pack(SignatureMessage(masking.signed(self._masks(task), alive, self.party.identity)))
            case TaskKind.REVEAL_CONTRIBUTORS | TaskKind.REVEAL:
                agreed, _ = unpack(base, SurvivorsMessage)
                masks = self._masks(task)
                masking.check_signatures(masks, agreed.sites, agreed.signatures)
                return pack(masking.revealed(masks, agreed.sites, self.party.shares))
            case _:
                raise AssertionError(f"{self.site} was asked for {task.kind}")

    def _take(self, base: Buffer, vector: Vector) -> Masks:
        deliveries = unpack(base, SharesMessage)[0].sealed
        self.party.take(self.roster, deliveries)
        masks = Masks(self.roster, vector, tuple(sorted({*deliveries, self.site})))
        if vector is Vector.CONTRIBUTORS:
            self.contributors = masks
        else:
            self.values = masks
        return masks

    def _masked(self, masks: Masks, kept: Array | None) -> Payload:
        self.values = masks
        vector = masked(masks, self.party.secrets, self.numbers(kept))
        return pack(SignatureMessage(b""), vector)

    def _masks(self, task: Task) -> Masks:
        return self.values if task.kind in (TaskKind.AGREE, TaskKind.REVEAL) else self.contributors


def total_of(words: Mapping[SiteId, Array]) -> Array:
    """The sum that the masked words of these sites open to."""
    return np.asarray(np.sum(list(words.values()), axis=0, dtype=np.uint64))
