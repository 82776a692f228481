"""The keys of one site for one sum, all derived from one secret, and the roster of the sites' public keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from protofed.common.codec import Digest, digest
from protofed.common.errors import SecureSumError
from protofed.common.payload import Array, SiteId
from protofed.common.protocol.messages import MAX_SUMMED, MIN_SUMMED
from protofed.common.secure_aggregation.context import SumContext, Vector, framed, site_list, threshold
from protofed.common.secure_aggregation.groups import Groups, check_parts, check_whole
from protofed.common.secure_aggregation.masks import add_mask, derived
from protofed.common.secure_aggregation.shamir import SEED_BYTES

ROOT_BYTES = 32


class SiteSecrets:
    """All secrets of one site for one sum, as functions of `root`: a daemon that was killed makes the same ones again.

    Args:
        root: `ROOT_BYTES` random bytes, stored before the first message and wiped with the sum.
    """

    def __init__(self, root: bytes, context: SumContext, site: SiteId) -> None:
        self._root, self.context, self.site = root, context, site
        self.share_key = X25519PrivateKey.from_private_bytes(self._derived("share key"))

    def self_seed(self, vector: Vector) -> bytes:
        """b: of the mask that the site shares with nobody."""
        return self._derived("self seed", vector)[:SEED_BYTES]

    def mask_seed(self, vector: Vector) -> bytes:
        """Of the private key of the masks that it shares with one other site each."""
        return self._derived("mask seed", vector)[:SEED_BYTES]

    def mask_key(self, vector: Vector) -> X25519PrivateKey:
        """That private key."""
        return mask_key(self.context, self.site, vector, self.mask_seed(vector))

    def random_words(self, length: int) -> Array:
        """Uniform words [N] uint64, the same again after a restart, that nobody else can make."""
        words = np.zeros(length, dtype=np.uint64)
        add_mask(words, self._derived("random words"))
        return words

    def _derived(self, purpose: str, *facts: str) -> bytes:
        return derived(self._root, self.context.bind(purpose, self.site, *facts))


def mask_key(context: SumContext, site: SiteId, vector: Vector, seed: bytes) -> X25519PrivateKey:
    """The private key that a seed gives; the server makes it of a site that dropped out."""
    return X25519PrivateKey.from_private_bytes(derived(seed, context.bind("mask key", site, vector)))


def commitment(context: SumContext, site: SiteId, vector: Vector, seed: bytes) -> bytes:
    """What a site promises of the seed of its own mask, so that nobody can pass off another one as that."""
    return derived(seed, context.bind("commitment", site, vector))


def public_bytes(key: X25519PrivateKey) -> bytes:
    """The public half of a key."""
    return key.public_key().public_bytes_raw()


def agreed(own: X25519PrivateKey, other: bytes) -> bytes:
    """The secret of two sites.

    Raises:
        SecureSumError: the other key is one that gives no secret.
    """
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise SecureSumError("bad-keys", "a site's public key gives no shared secret") from error


@dataclass(frozen=True)
class KeyAdvert:
    """The public keys of one site for one sum, signed by its identity.

    Attributes:
        identity: Ed25519; other sites have pinned it.
        endorsement: what ties the identity to the site's certificate; checked where certificates are known.
        share_key: X25519; shares for this site are sealed with it.
        mask_keys: X25519, for each vector.
        commitments: to the seeds of its own masks, for each vector.
    """

    site: SiteId
    identity: bytes
    endorsement: bytes
    share_key: bytes
    mask_keys: tuple[bytes, ...]
    commitments: tuple[bytes, ...]
    signature: bytes

    @property
    def facts(self) -> bytes:
        """All but the signature."""
        keys = (self.share_key, *self.mask_keys, *self.commitments)
        return framed([self.site.encode(), self.identity, self.endorsement, *keys])


def advertised(secrets: SiteSecrets, identity: Ed25519PrivateKey, endorsement: bytes) -> KeyAdvert:
    """The site's own advert; the same bytes at every call."""
    context, site = secrets.context, secrets.site
    unsigned = KeyAdvert(
        site,
        identity.public_key().public_bytes_raw(),
        endorsement,
        public_bytes(secrets.share_key),
        tuple(public_bytes(secrets.mask_key(vector)) for vector in context.vectors),
        tuple(commitment(context, site, vector, secrets.self_seed(vector)) for vector in context.vectors),
        b"",
    )
    signature = identity.sign(context.bind("keys", unsigned.facts))
    return KeyAdvert(**{**vars(unsigned), "signature": signature})


def check_keys(advert: KeyAdvert) -> None:
    """Check that all keys of an advert differ, and that each gives a secret.

    Raises:
        SecureSumError: they do not.
    """
    keys, trial = (advert.share_key, *advert.mask_keys), X25519PrivateKey.generate()
    if len({advert.identity, *keys}) != 1 + len(keys):
        raise SecureSumError("bad-keys", f"two keys of {advert.site} are equal")
    for key in keys:
        agreed(trial, key)


@dataclass(frozen=True)
class Roster:
    """The adverts of one sum, sorted by site: whose masks cancel.

    Attributes:
        groups: of its sites; a set of them that is summed is made of whole ones.

    Raises:
        SecureSumError: too few or too many sites, two adverts of a site, two equal keys, or a site not in one group.
    """

    context: SumContext
    adverts: tuple[KeyAdvert, ...]
    groups: Groups

    def __post_init__(self) -> None:
        sites = [advert.site for advert in self.adverts]
        if sites != sorted(set(sites)):
            raise SecureSumError("bad-keys", "the roster names a site twice, or its sites are out of order")
        if not MIN_SUMMED <= len(sites) <= MAX_SUMMED:
            raise SecureSumError(
                "too-few-sites", f"a secure sum takes {MIN_SUMMED} to {MAX_SUMMED} sites; this has {len(sites)}"
            )
        keys = [key for advert in self.adverts for key in (advert.identity, advert.share_key, *advert.mask_keys)]
        if len(set(keys)) != len(keys):
            raise SecureSumError("bad-keys", "two keys of the roster are equal")
        check_parts(self.groups, sites)

    @cached_property
    def by_site(self) -> Mapping[SiteId, KeyAdvert]:
        """The adverts by site, in the order of sites."""
        return {advert.site: advert for advert in self.adverts}

    @cached_property
    def places(self) -> Mapping[SiteId, int]:
        """Which share of each secret is whose, from 0."""
        return {advert.site: place for place, advert in enumerate(self.adverts)}

    @cached_property
    def digest(self) -> Digest:
        """A digest of the groups, and of all adverts with their signatures."""
        adverts = (framed([advert.facts, advert.signature]) for advert in self.adverts)
        return digest(self.context.bind("roster", framed(map(site_list, self.groups)), *adverts))

    @property
    def threshold(self) -> int:
        """How many of its sites must agree and reveal."""
        return threshold(len(self.adverts))

    def mask_key(self, site: SiteId, vector: Vector) -> bytes:
        """A site's public mask key."""
        return self.by_site[site].mask_keys[self.context.vectors.index(vector)]

    def check_signatures(self) -> None:
        """Check that each advert is signed by the identity that it names, for this very sum.

        Raises:
            SecureSumError: one is not.
        """
        for advert in self.adverts:
            vectors = len(self.context.vectors)
            if (len(advert.mask_keys), len(advert.commitments)) != (vectors, vectors):
                raise SecureSumError("bad-keys", f"the keys of {advert.site} are not those of {vectors} vectors")
            check_signature(advert.identity, advert.signature, self.context.bind("keys", advert.facts), advert.site)


def check_signature(identity: bytes, signature: bytes, signed: bytes, site: SiteId) -> None:
    """Check a site's signature.

    Raises:
        SecureSumError: it is not this identity's over these bytes.
    """
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, signed)
    except (InvalidSignature, ValueError) as error:
        raise SecureSumError(
            "bad-signature",
            f"a message in the name of {site} is not signed by it for this sum: it was sent another model or recipe "
            "than this site, or another wrote it",
        ) from error


def check_members(roster: Roster, sites: Sequence[SiteId], what: str) -> None:
    """Check that a set of sites is sorted, within the roster, large enough and made of whole groups.

    Raises:
        SecureSumError: it is not.
    """
    if list(sites) != sorted(set(sites)) or not set(sites) <= roster.by_site.keys():
        raise SecureSumError("other-survivors", f"the {what} are no sorted set of the roster's sites")
    if len(sites) < roster.threshold:
        raise SecureSumError(
            "too-few-sites", f"{len(sites)} {what} of {len(roster.adverts)}; {roster.threshold} are needed"
        )
    check_whole(roster.groups, sites, what)
