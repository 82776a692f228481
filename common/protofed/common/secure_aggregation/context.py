"""What a secure sum is about, and how that is bound into every signature, key and mask of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from protofed.common.codec import Digest
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import Subject

_PROTOCOL = b"protofed secure sum 1"


class Vector(StrEnum):
    """The vectors of a sum, in their order; each has masks of its own, so that opening one opens no other."""

    HOLDERS = "holders"  # how many sites hold each row, before any row leaves
    VALUES = "values"


@dataclass(frozen=True)
class SumContext:
    """Which sum it is: sites that were told different ones cannot be summed.

    Attributes:
        recipe: digest of the run's recipe, as the site read it.
        base: digest of the model that the sites were sent.
        vectors: those that are summed, HOLDERS first.
    """

    run: str
    round: int
    attempt: int
    subject: Subject
    recipe: Digest
    base: Digest
    vectors: tuple[Vector, ...] = (Vector.VALUES,)
    _bound: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = ",".join(self.vectors)
        facts = (self.run, str(self.round), str(self.attempt), self.subject, self.recipe, self.base, names)
        object.__setattr__(self, "_bound", framed([_PROTOCOL, *(fact.encode() for fact in facts)]))

    def bind(self, purpose: str, *facts: str | bytes) -> bytes:
        """What is signed, or what a key is derived for: the context, the purpose and these facts, unambiguously."""
        encoded = (fact.encode() if isinstance(fact, str) else fact for fact in facts)
        return framed([self._bound, purpose.encode(), *encoded])


def framed(pieces: Iterable[bytes]) -> bytes:
    """Pieces, each behind its length: no two lists of pieces give the same bytes."""
    return b"".join(len(piece).to_bytes(8, "big") + piece for piece in pieces)


def site_list(sites: Iterable[SiteId]) -> bytes:
    """A set of sites as bytes."""
    return framed(site.encode() for site in sorted(sites))


def threshold(sites: int) -> int:
    """t: so many sites of a sum must agree and reveal; fewer, with the server, learn nothing of another site."""
    return 2 * sites // 3 + 1
