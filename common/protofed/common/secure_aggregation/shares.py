"""The seeds of a site's masks, split into shares and sealed for each other site."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from protofed.common.errors import SecureSumError
from protofed.common.payload import SiteId
from protofed.common.secure_aggregation.context import Vector
from protofed.common.secure_aggregation.keys import Roster, SiteSecrets, agreed
from protofed.common.secure_aggregation.masks import derived
from protofed.common.secure_aggregation.shamir import SEED_BYTES, split

_NONCE = bytes(12)  # each key seals one message


class Share(NamedTuple):
    """One site's shares of another's secrets for one vector."""

    self_seed: bytes
    mask_seed: bytes


SharesOfSite = Mapping[Vector, Share]


def dealt(secrets: SiteSecrets, roster: Roster) -> dict[SiteId, SharesOfSite]:
    """By site, its shares of this site's seeds, its own among them. Drawn anew at each call: what was sent is kept."""
    count, needed, vectors = len(roster.adverts), roster.threshold, secrets.context.vectors
    split_seeds = {
        vector: (
            split(secrets.self_seed(vector), needed, count),
            split(secrets.mask_seed(vector), needed, count),
        )
        for vector in vectors
    }
    return {
        site: {vector: Share(*(shares[place] for shares in split_seeds[vector])) for vector in vectors}
        for site, place in roster.places.items()
    }


def sealed(secrets: SiteSecrets, roster: Roster, dealt_shares: Mapping[SiteId, SharesOfSite]) -> dict[SiteId, bytes]:
    """By each other site, its shares so that only it can read them."""
    return {
        site: _seal(secrets, roster, secrets.site, site).encrypt(_NONCE, packed(shares), None)
        for site, shares in dealt_shares.items()
        if site != secrets.site
    }


def opened(secrets: SiteSecrets, roster: Roster, deliveries: Mapping[SiteId, bytes]) -> dict[SiteId, SharesOfSite]:
    """By site that dealt them, the shares that this site was sent.

    Raises:
        SecureSumError: one was not sealed by the site that it is said to come from, for this roster and this site.
    """
    found = {}
    for site, ciphertext in deliveries.items():
        try:
            plain = _seal(secrets, roster, site, secrets.site).decrypt(_NONCE, ciphertext, None)
        except InvalidTag as error:
            raise SecureSumError("bad-shares", f"the shares in the name of {site} were not sealed by it") from error
        found[site] = unpacked(plain, secrets.context.vectors)
    return found


def packed(shares: SharesOfSite) -> bytes:
    """Shares of one site as bytes."""
    return b"".join(seed for share in shares.values() for seed in share)


def unpacked(data: bytes, vectors: tuple[Vector, ...]) -> SharesOfSite:
    """What `packed` gave.

    Raises:
        SecureSumError: it has another size.
    """
    if len(data) != 2 * SEED_BYTES * len(vectors):
        raise SecureSumError("bad-shares", f"{len(data)} bytes are no shares of {len(vectors)} vectors")
    seeds = [data[begin : begin + SEED_BYTES] for begin in range(0, len(data), SEED_BYTES)]
    return {vector: Share(*seeds[2 * number : 2 * number + 2]) for number, vector in enumerate(vectors)}


def _seal(secrets: SiteSecrets, roster: Roster, sender: SiteId, receiver: SiteId) -> ChaCha20Poly1305:
    other = receiver if sender == secrets.site else sender
    if other not in roster.by_site:
        raise SecureSumError("bad-shares", f"{other} is not in the roster")
    secret = agreed(secrets.share_key, roster.by_site[other].share_key)
    return ChaCha20Poly1305(derived(secret, roster.context.bind("shares", roster.digest, sender, receiver)))
