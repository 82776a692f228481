"""All sites and the server of one secure aggregation in memory, so that a test can drop, replace or lie at any step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protofed.common.codec import digest
from protofed.common.payload import Array, SiteId
from protofed.common.protocol.messages import SumOf
from protofed.common.secure_aggregation import keys, masking
from protofed.common.secure_aggregation.groups import Groups, alone
from protofed.common.secure_aggregation.keys import KeyAdvert, Roster, SiteSecrets, SumContext, Vector
from protofed.common.secure_aggregation.masking import Masks, Revealed

CONTEXT = SumContext(
    "run", 3, 1, SumOf.UPDATE, digest(b"recipe"), digest(b"base"), (Vector.CONTRIBUTORS, Vector.VALUES)
)


def identity_of(site: SiteId) -> Ed25519PrivateKey:
    """The same key for a site in all tests."""
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(digest(site.encode())))


@dataclass
class Party:
    """One site; `shares` are those that it was dealt, its own among them."""

    site: SiteId
    context: SumContext = CONTEXT
    secrets: SiteSecrets = field(init=False)
    shares: dict[SiteId, masking.SharesOfSite] = field(default_factory=dict)

    def __post_init__(self) -> None:
        root = bytes.fromhex(digest(b"root", self.site.encode()))
        self.secrets = SiteSecrets(root, self.context, self.site)

    @property
    def identity(self) -> Ed25519PrivateKey:
        return identity_of(self.site)

    def advert(self) -> KeyAdvert:
        return keys.advertised(self.secrets, self.identity, b"")

    def deal(self, roster: Roster) -> dict[SiteId, bytes]:
        dealt = masking.dealt(self.secrets, roster)
        self.shares[self.site] = dealt[self.site]
        return masking.sealed(self.secrets, roster, dealt)

    def take(self, roster: Roster, deliveries: Mapping[SiteId, bytes]) -> None:
        self.shares |= masking.opened_shares(self.secrets, roster, deliveries)


@dataclass
class Sum:
    """A sum of sites "site-1", "site-2", …, up to the point that a test asks for."""

    parties: dict[SiteId, Party]
    roster: Roster
    included: tuple[SiteId, ...]

    @classmethod
    def of(
        cls,
        count: int,
        silent_after_keys: Sequence[SiteId] = (),
        context: SumContext = CONTEXT,
        groups: Groups | None = None,
    ) -> Sum:
        """Keys and shares are exchanged; these sites sent keys only. Without `groups` each is a group of its own."""
        parties = {name: Party(name, context) for name in (f"site-{n:02}" for n in range(1, count + 1))}
        adverts = tuple(party.advert() for party in parties.values())
        roster = Roster(context, adverts, alone(parties) if groups is None else groups)
        roster.check_signatures()
        included = tuple(site for site in parties if site not in silent_after_keys)
        sent = {site: parties[site].deal(roster) for site in included}
        for site in included:
            parties[site].take(roster, {other: sent[other][site] for other in included if other != site})
        return cls(parties, roster, included)

    def masks(self, vector: Vector = Vector.VALUES) -> Masks:
        return Masks(self.roster, vector, self.included)

    def masked(self, numbers: Mapping[SiteId, Array], vector: Vector = Vector.VALUES) -> dict[SiteId, Array]:
        """By site, what it sends."""
        masks = self.masks(vector)
        return {site: masking.masked(masks, self.parties[site].secrets, array) for site, array in numbers.items()}

    def signatures(self, alive: Sequence[SiteId], vector: Vector = Vector.VALUES) -> dict[SiteId, bytes]:
        masks = self.masks(vector)
        return {site: masking.signed(masks, alive, self.parties[site].identity) for site in alive}

    def reveal(
        self, alive: Sequence[SiteId], by: Sequence[SiteId] | None = None, vector: Vector = Vector.VALUES
    ) -> dict[SiteId, Revealed]:
        """What sites (all survivors) reveal once they agreed."""
        masks, signatures = self.masks(vector), self.signatures(alive, vector)
        masking.check_signatures(masks, alive, signatures)
        return {site: masking.revealed(masks, alive, self.parties[site].shares) for site in by or alive}

    def total(
        self, numbers: Mapping[SiteId, Array], alive: Sequence[SiteId], by: Sequence[SiteId] | None = None
    ) -> Array:
        """The sum of the survivors' numbers, of the masked ones of all."""
        masks, sent = self.masks(), self.masked(numbers)
        seeds = masking.opened(masks, alive, self.reveal(alive, by))
        return masking.unmasked(masks, alive, (sent[site] for site in alive), seeds)


def numbers_of(sites: Sequence[SiteId], length: int = 1000) -> dict[SiteId, Array]:
    """Random words, the same for a site in all tests."""
    return {
        site: np.random.default_rng(int(digest(site.encode())[:8], 16)).integers(
            0, 2**64, length, dtype=np.uint64, endpoint=False
        )
        for site in sites
    }
