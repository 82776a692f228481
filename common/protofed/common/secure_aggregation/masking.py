"""A site's vector under its masks, and the sum of the sites' vectors without them.

First the seeds of a site's masks are split into shares and sealed for each other site. Then the vectors are masked, and
the sites agree by signatures on the set whose vectors are aggregated, before anything is revealed.

How many sites hold each row is decrypted before any row is sent. A row of too few sites is sent by nobody. A server
that lied about the counts could have a row that one site alone holds sent as the "sum" of it. So each site is given all
masked flags, each signed by its site, with the seeds that open them, and counts for itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from protofed.common.codec import digest
from protofed.common.errors import SecureAggregationError
from protofed.common.payload import Array, SiteId
from protofed.common.secure_aggregation.keys import (
    SEED_BYTES,
    Roster,
    SiteSecrets,
    SumContext,
    Vector,
    add_mask,
    agreed,
    check_members,
    check_signature,
    combined,
    commitment,
    derived,
    mask_key,
    public_bytes,
    site_list,
    split,
)

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


def opened_shares(
    secrets: SiteSecrets, roster: Roster, deliveries: Mapping[SiteId, bytes]
) -> dict[SiteId, SharesOfSite]:
    """By site that dealt them, the shares that this site was sent.

    Raises:
        SecureAggregationError: one was not sealed by the site that it names, for this roster and this site.
    """
    shares = {}
    for site, ciphertext in deliveries.items():
        try:
            plain = _seal(secrets, roster, site, secrets.site).decrypt(_NONCE, ciphertext, None)
        except InvalidTag as error:
            raise SecureAggregationError("bad-shares", f"{site} did not seal the shares in its name") from error
        shares[site] = unpacked(plain, secrets.context.vectors)
    return shares


def packed(shares: SharesOfSite) -> bytes:
    """Shares of one site as bytes."""
    return b"".join(seed for share in shares.values() for seed in share)


def unpacked(data: bytes, vectors: tuple[Vector, ...]) -> SharesOfSite:
    """What `packed` gave.

    Raises:
        SecureAggregationError: it has another size.
    """
    if len(data) != 2 * SEED_BYTES * len(vectors):
        raise SecureAggregationError("bad-shares", f"{len(data)} bytes are no shares of {len(vectors)} vectors")
    seeds = [data[begin : begin + SEED_BYTES] for begin in range(0, len(data), SEED_BYTES)]
    return {vector: Share(*seeds[2 * number : 2 * number + 2]) for number, vector in enumerate(vectors)}


def _seal(secrets: SiteSecrets, roster: Roster, sender: SiteId, receiver: SiteId) -> ChaCha20Poly1305:
    other = receiver if sender == secrets.site else sender
    if other not in roster.by_site:
        raise SecureAggregationError("bad-shares", f"{other} is not in the roster")
    secret = agreed(secrets.share_key, roster.by_site[other].share_key)
    return ChaCha20Poly1305(derived(secret, roster.context.bind("shares", roster.digest, sender, receiver)))


@dataclass(frozen=True)
class Masks:
    """Which masks are in the vectors of one kind: those of all pairs of `included`, and one of each site's own.

    Attributes:
        included: the sites whose shares all others have; sorted.
    """

    roster: Roster
    vector: Vector
    included: tuple[SiteId, ...]

    @property
    def context(self) -> SumContext:
        """Of the roster."""
        return self.roster.context

    def own_key(self, site: SiteId, seed: bytes) -> bytes:
        """Of the mask that a site shares with nobody."""
        return derived(seed, self.context.bind("self mask", self._version, self.vector, site))

    def pair_key(self, site: SiteId, private: X25519PrivateKey, other: SiteId) -> bytes:
        """Of the mask that two sites share; either of them may be `site`."""
        secret = agreed(private, self.roster.mask_key(other, self.vector))
        return derived(secret, self.context.bind("pair mask", self._version, self.vector, *sorted((site, other))))

    @property
    def _version(self) -> bytes:
        return self.roster.digest.encode() + site_list(self.included)


def masked(masks: Masks, secrets: SiteSecrets, numbers: Array) -> Array:
    """A site's numbers [N] uint64 under all its masks, uniform to whoever lacks one of them."""
    total = numbers.copy()
    add_mask(total, masks.own_key(secrets.site, secrets.self_seed(masks.vector)))
    _add_pairs(total, masks, secrets.site, secrets.mask_key(masks.vector), masks.included)
    return total


@dataclass(frozen=True)
class Revealed:
    """What one site reveals for one vector: of each site one share, of its own mask or of its mask key.

    Attributes:
        self_seeds: by survivor.
        mask_seeds: by site that dropped out.
    """

    self_seeds: Mapping[SiteId, bytes]
    mask_seeds: Mapping[SiteId, bytes]


@dataclass(frozen=True)
class Opened:
    """The seeds that enough reveals gave: of each survivor's own mask, and of the keys of those that dropped out."""

    self_seeds: Mapping[SiteId, bytes]
    mask_seeds: Mapping[SiteId, bytes]


def opened(masks: Masks, survivors: Sequence[SiteId], revealed: Mapping[SiteId, Revealed]) -> Opened:
    """Combine the shares that sites revealed.

    Raises:
        SecureAggregationError: there are too few shares, or they do not give the seeds that were promised.
    """
    dropped = [site for site in masks.included if site not in survivors]
    shares = {
        masks.roster.places[by]: [message.self_seeds[site] for site in survivors]
        + [message.mask_seeds[site] for site in dropped]
        for by, message in revealed.items()
        if message.self_seeds.keys() == set(survivors) and message.mask_seeds.keys() == set(dropped)
    }
    promised = [partial(_is_self_seed, masks, site) for site in survivors]
    promised += [partial(_is_mask_seed, masks, site) for site in dropped]
    seeds = dict(zip([*survivors, *dropped], combined(shares, masks.roster.threshold, promised), strict=True))
    known = {site: seed for site, seed in seeds.items() if seed is not None}
    if len(known) < len(seeds):
        raise SecureAggregationError(
            "false-shares", _who_lied(masks, sorted(seeds.keys() - known.keys()), known, revealed)
        )
    return Opened({site: known[site] for site in survivors}, {site: known[site] for site in dropped})


def _who_lied(masks: Masks, failed: Sequence[SiteId], known: Collection[SiteId], revealed: Collection[SiteId]) -> str:
    """As far as it can be known: a site dealt false shares of its seed, or too many revealed false ones of it."""
    many = len(revealed) - masks.roster.threshold + 1
    liars = f"{many} or more of {', '.join(sorted(revealed))} revealed false shares"
    if not known:  # of all seeds at once
        return f"the shares that sites revealed do not give the seed that was promised: {liars}"
    names = ", ".join(failed)
    return f"the shares of {names} do not give what {names} promised: they were dealt false, or {liars}. All others do"


def check_opened(masks: Masks, survivors: Sequence[SiteId], seeds: Opened) -> None:
    """Check seeds that somebody else combined against what their sites promised.

    Raises:
        SecureAggregationError: they are not those of these survivors and of those that dropped out.
    """
    sound = (
        seeds.self_seeds.keys() == set(survivors)
        and seeds.mask_seeds.keys() == set(masks.included) - set(survivors)
        and all(_is_self_seed(masks, site, seed) for site, seed in seeds.self_seeds.items())
        and all(_is_mask_seed(masks, site, seed) for site, seed in seeds.mask_seeds.items())
    )
    if not sound:
        raise SecureAggregationError("false-shares", "the revealed seeds are not those that the sites promised")


def unmasked(masks: Masks, survivors: Sequence[SiteId], vectors: Iterable[Array], seeds: Opened) -> Array:
    """The sum [N] uint64 of the survivors' numbers.

    Args:
        vectors: their masked ones, each read once.

    Raises:
        SecureAggregationError: there is no vector, or two are of different lengths.
    """
    total: Array | None = None
    for vector in vectors:
        if total is None:
            total = np.array(vector, dtype=np.uint64)
        elif len(vector) != len(total):
            raise SecureAggregationError("bad-vector", f"a vector of {len(vector)} numbers among those of {len(total)}")
        else:
            total += vector
    if total is None:
        raise SecureAggregationError("too-few-sites", "no vector to sum")
    for site in survivors:
        add_mask(total, masks.own_key(site, seeds.self_seeds[site]), subtract=True)
    for site, seed in seeds.mask_seeds.items():
        # The survivors' halves of the masks that they had with it: its own ones, had it sent them, would cancel these.
        _add_pairs(total, masks, site, mask_key(masks.context, site, masks.vector, seed), survivors)
    return total


def _is_self_seed(masks: Masks, site: SiteId, seed: bytes) -> bool:
    """Whether the site promised this seed."""
    promised = masks.roster.by_site[site].commitments[masks.context.vectors.index(masks.vector)]
    return commitment(masks.context, site, masks.vector, seed) == promised


def _is_mask_seed(masks: Masks, site: SiteId, seed: bytes) -> bool:
    """Whether it gives the mask key that the site advertised."""
    private = mask_key(masks.context, site, masks.vector, seed)
    return public_bytes(private) == masks.roster.mask_key(site, masks.vector)


def _add_pairs(total: Array, masks: Masks, site: SiteId, private: X25519PrivateKey, partners: Iterable[SiteId]) -> None:
    """Add a site's part of the masks that it shares: the first site of a pair adds, the second subtracts."""
    for other in partners:
        if other != site:
            add_mask(total, masks.pair_key(site, private, other), subtract=site > other)


def signed_vector(masks: Masks, vector: Array, identity: Ed25519PrivateKey) -> bytes:
    """A site's signature under its masked flags [N] uint64."""
    return identity.sign(_statement(masks, vector))


def check_vector(masks: Masks, site: SiteId, vector: Array, signature: bytes) -> None:
    """Check that masked flags are those that a site sent.

    Raises:
        SecureAggregationError: they are not.
    """
    check_signature(masks.roster.by_site[site].identity, signature, _statement(masks, vector), site)


def counted(
    masks: Masks,
    survivors: Sequence[SiteId],
    vectors: Mapping[SiteId, Array],
    signatures: Mapping[SiteId, bytes],
    seeds: Opened,
) -> Array:
    """The number of contributors [N] int64 of each row, computed from what the sites sent.

    Raises:
        SecureAggregationError: something is not what its site sent or promised, or the sum is no count of these sites.
    """
    if not (set(survivors) == vectors.keys() == signatures.keys()):
        raise SecureAggregationError("other-survivors", "the masked flags do not come from the survivors")
    for site in survivors:
        check_vector(masks, site, vectors[site], signatures[site])
    check_opened(masks, survivors, seeds)
    counts = unmasked(masks, survivors, (vectors[site] for site in survivors), seeds).view(np.int64)
    if len(counts) and not 0 <= counts.min() <= counts.max() <= len(survivors):
        raise SecureAggregationError("bad-vector", "the numbers of contributors cannot be right: a site sent no flags")
    return counts


def _statement(masks: Masks, vector: Array) -> bytes:
    facts = (masks.roster.digest, masks.vector, site_list(masks.included), digest(vector.tobytes()))
    return masks.context.bind("contributors", *facts)


def signed(masks: Masks, survivors: Sequence[SiteId], identity: Ed25519PrivateKey) -> bytes:
    """A site's signature under the survivors; it signs one set for each vector, and never another.

    Raises:
        SecureAggregationError: they are too few, split a group, or are not among those that are masked.
    """
    check_survivors(masks, survivors)
    return identity.sign(_agreement(masks, survivors))


def check_survivors(masks: Masks, survivors: Sequence[SiteId]) -> None:
    """Check that survivors are enough, whole groups, and all of those whose masks are in.

    Raises:
        SecureAggregationError: they are not.
    """
    check_members(masks.roster, survivors, "survivors")
    if not set(survivors) <= set(masks.included):
        raise SecureAggregationError("other-survivors", "a survivor is not among the sites that dealt shares")


def check_signatures(masks: Masks, survivors: Sequence[SiteId], signatures: Mapping[SiteId, bytes]) -> None:
    """Check that so many survivors have signed this set that no other one can have as many.

    Raises:
        SecureAggregationError: there are too few signatures, or one is false.
    """
    check_survivors(masks, survivors)
    if not signatures.keys() <= set(survivors) or len(signatures) < masks.roster.threshold:
        raise SecureAggregationError(
            "too-few-sites", f"{len(signatures)} survivors agreed on who they are; {masks.roster.threshold} are needed"
        )
    statement = _agreement(masks, survivors)
    for site, signature in signatures.items():
        check_signature(masks.roster.by_site[site].identity, signature, statement, site)


def check_signed(masks: Masks, survivors: Sequence[SiteId], site: SiteId, signature: bytes) -> None:
    """Check that a site of the roster has signed these survivors.

    Raises:
        SecureAggregationError: it has not.
    """
    check_signature(masks.roster.by_site[site].identity, signature, _agreement(masks, survivors), site)


def revealed(masks: Masks, survivors: Sequence[SiteId], shares: Mapping[SiteId, SharesOfSite]) -> Revealed:
    """What a site reveals once the survivors are agreed: of each included site one share, never both.

    Args:
        shares: by site that dealt them, the shares that this site has, its own among them.
    """
    alive = set(survivors)
    return Revealed(
        {site: shares[site][masks.vector].self_seed for site in masks.included if site in alive},
        {site: shares[site][masks.vector].mask_seed for site in masks.included if site not in alive},
    )


def _agreement(masks: Masks, survivors: Sequence[SiteId]) -> bytes:
    facts = (masks.roster.digest, masks.vector, site_list(masks.included), site_list(survivors))
    return masks.context.bind("survivors", *facts)
