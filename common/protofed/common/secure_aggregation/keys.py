"""The keys of one site for one sum, all derived from one secret, and the roster of the sites' public keys.

`SumContext` is what a sum is about, and is bound into every signature, key and mask of it. Masks are streams of
ChaCha20 as words of the ring. Of a seed's shares any `threshold` give it back, fewer say nothing of it (Shamir 1979, in
GF(2**128)).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protofed.common.codec import Digest, digest
from protofed.common.errors import SecureAggregationError
from protofed.common.payload import Array, SiteId
from protofed.common.protocol.messages import MAX_SECURE_SITES, MIN_SECURE_SITES, SumOf
from protofed.common.secure_aggregation.groups import Groups, check_parts, check_whole

_PROTOCOL = b"protofed secure aggregation 1"


class Vector(StrEnum):
    """The vectors of a sum, in their order; each has masks of its own, so that opening one opens no other."""

    CONTRIBUTORS = "contributors"  # how many sites hold each row, before any row leaves
    VALUES = "values"


@dataclass(frozen=True)
class SumContext:
    """Which sum it is: sites that were told different ones cannot be aggregated.

    Attributes:
        recipe: digest of the run's recipe, as the site read it.
        base: digest of the model that the sites were sent.
        vectors: those that are aggregated, CONTRIBUTORS first.
    """

    run: str
    round: int
    attempt: int
    sum_of: SumOf
    recipe: Digest
    base: Digest
    vectors: tuple[Vector, ...] = (Vector.VALUES,)
    _bound: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = ",".join(self.vectors)
        facts = (self.run, str(self.round), str(self.attempt), self.sum_of, self.recipe, self.base, names)
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


def helpers_within(group: int) -> int:
    """How many other sites of a group of this size must help the server before it can read one site's update.

    All others, or as many as can reveal every secret.
    """
    return min(group - 1, threshold(group))


def helpers_outside(group: int, sites: int) -> int | None:
    """How many sites of other groups are enough for a server that lies about who is missing; None: no lie helps.

    The lie: some sites see a set of survivors with the group, other sites a set without it. `threshold` sites must sign
    each set. An honest site signs one set, a helper both.

    Args:
        group: sites of the group.
        sites: the most sites that are aggregated together.
    """
    totals = [n for n in range(group + 1, sites + 1) if n - group >= threshold(n)]
    return min((2 * threshold(n) - n for n in totals), default=None)


KEY_BYTES = 32
_BLOCK_WORDS = 1 << 13  # 64 KiB, which stays in a core's cache: 4 GB/s, ten times that of single words
_NO_NONCE = bytes(16)  # each key makes one stream


def derived(secret: bytes, purpose: bytes) -> bytes:
    """A key of `KEY_BYTES` for one purpose."""
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose).derive(secret)


def add_mask(vector: Array, key: bytes, *, subtract: bool = False) -> None:
    """Add a key's stream to a vector [N] uint64 in place, or take it away.

    Args:
        key: of `KEY_BYTES`, used for this one stream.
    """
    encryptor = Cipher(algorithms.ChaCha20(key, _NO_NONCE), mode=None).encryptor()
    stream = bytearray(_BLOCK_WORDS * 8)
    zeros, words = bytes(len(stream)), np.frombuffer(stream, dtype="<u8")
    combine = np.subtract if subtract else np.add
    for begin in range(0, len(vector), _BLOCK_WORDS):
        piece = vector[begin : begin + _BLOCK_WORDS]
        encryptor.update_into(memoryview(zeros)[: piece.nbytes], memoryview(stream)[: piece.nbytes])
        combine(piece, words[: len(piece)], out=piece)


SEED_BYTES = 16
_MAX_TRIES = 1000  # of choosing sound shares among damaged ones, of all seeds together: of 34 shares 23 s


def split(seed: bytes, threshold: int, count: int) -> list[bytes]:
    """`count` shares of `SEED_BYTES` each, in the order of the sites that they are for."""
    return [share for _, share in Shamir.split(threshold, count, seed)]


def combined(
    shares: Mapping[int, Sequence[bytes]], threshold: int, are_seeds: Sequence[Callable[[bytes], bool]]
) -> list[bytes | None]:
    """The seeds of shares by their places, counted from 0; a few false ones do no harm if enough sound ones are there.

    Those whose shares gave one seed are asked for all others at once: who lies of all costs no more than of one.

    Args:
        shares: by place, one of each seed; who has one of another size is left out.
        are_seeds: for each, whether a result is the seed that its site promised.

    Returns:
        None for a seed that no choice of shares gave.

    Raises:
        SecureAggregationError: there are fewer shares than the threshold.
    """
    usable = {place: row for place, row in shares.items() if all(len(share) == SEED_BYTES for share in row)}
    if len(usable) < threshold:
        raise SecureAggregationError(
            "too-few-shares", f"{len(usable)} usable shares are there, and {threshold} are needed"
        )
    seeds: list[bytes | None] = [None] * len(are_seeds)

    def gives(choice: tuple[int, ...], number: int) -> bool:
        seed = Shamir.combine([(place + 1, usable[place][number]) for place in choice])
        seeds[number] = seed if are_seeds[number](seed) else None
        return seeds[number] is not None

    def missing() -> list[int]:
        return [number for number, seed in enumerate(seeds) if seed is None]

    places = sorted(usable)
    for number in missing():
        gives(tuple(places[:threshold]), number)
    for choice, turn in _choices(places, threshold, len(missing())):
        if not (unsolved := missing()):
            break
        # One seed a try, in turn: that of a site which dealt false shares must not use up the tries of all others.
        if gives(choice, unsolved[turn % len(unsolved)]):
            for number in missing():
                gives(choice, number)
    return seeds


def _choices(places: Sequence[int], count: int, seeds: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Choices of places, each with a turn.

    They are all pairs, if all can be tried. Otherwise they are random choices, because the first in order are nearly
    the same.
    """
    if math.comb(len(places), count) * seeds <= 2 * _MAX_TRIES:
        yield from ((choice, turn) for turn in range(seeds) for choice in itertools.combinations(places, count))
        return
    rng = np.random.default_rng(0)
    for turn in range(_MAX_TRIES):
        yield tuple(sorted(rng.choice(places, count, replace=False).tolist())), turn


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
        SecureAggregationError: the other key is one that gives no secret.
    """
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise SecureAggregationError("bad-keys", "a site's public key gives no shared secret") from error


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
        SecureAggregationError: they do not.
    """
    keys, trial = (advert.share_key, *advert.mask_keys), X25519PrivateKey.generate()
    if len({advert.identity, *keys}) != 1 + len(keys):
        raise SecureAggregationError("bad-keys", f"two keys of {advert.site} are equal")
    for key in keys:
        agreed(trial, key)


@dataclass(frozen=True)
class Roster:
    """The adverts of one sum, sorted by site: whose masks cancel.

    Attributes:
        groups: of its sites; a set of sites that is aggregated is made of whole groups.

    Raises:
        SecureAggregationError: too few or too many sites, two adverts of a site, equal keys, or a site in no group.
    """

    context: SumContext
    adverts: tuple[KeyAdvert, ...]
    groups: Groups

    def __post_init__(self) -> None:
        sites = [advert.site for advert in self.adverts]
        if sites != sorted(set(sites)):
            raise SecureAggregationError("bad-keys", "the roster names a site twice, or its sites are out of order")
        if not MIN_SECURE_SITES <= len(sites) <= MAX_SECURE_SITES:
            raise SecureAggregationError(
                "too-few-sites",
                f"a secure aggregation takes {MIN_SECURE_SITES} to {MAX_SECURE_SITES} sites; this has {len(sites)}",
            )
        keys = [key for advert in self.adverts for key in (advert.identity, advert.share_key, *advert.mask_keys)]
        if len(set(keys)) != len(keys):
            raise SecureAggregationError("bad-keys", "two keys of the roster are equal")
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
            SecureAggregationError: one is not.
        """
        for advert in self.adverts:
            vectors = len(self.context.vectors)
            if (len(advert.mask_keys), len(advert.commitments)) != (vectors, vectors):
                raise SecureAggregationError("bad-keys", f"the keys of {advert.site} do not fit {vectors} vectors")
            check_signature(advert.identity, advert.signature, self.context.bind("keys", advert.facts), advert.site)


def check_signature(identity: bytes, signature: bytes, signed: bytes, site: SiteId) -> None:
    """Check a site's signature.

    Raises:
        SecureAggregationError: it is not this identity's over these bytes.
    """
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, signed)
    except (InvalidSignature, ValueError) as error:
        raise SecureAggregationError(
            "bad-signature",
            f"{site} did not sign a message in its name for this aggregation. Either the server sent it another "
            "model or recipe than this site, or somebody else wrote the message",
        ) from error


def check_members(roster: Roster, sites: Sequence[SiteId], what: str) -> None:
    """Check that a set of sites is sorted, within the roster, large enough and made of whole groups.

    Raises:
        SecureAggregationError: it is not.
    """
    if list(sites) != sorted(set(sites)) or not set(sites) <= roster.by_site.keys():
        raise SecureAggregationError("other-survivors", f"the {what} are not in order, or not all sites of the roster")
    if len(sites) < roster.threshold:
        raise SecureAggregationError(
            "too-few-sites", f"{len(sites)} {what} of {len(roster.adverts)}; {roster.threshold} are needed"
        )
    check_whole(roster.groups, sites, what)
