"""A site's vector under its masks, and the sum of the sites' vectors without them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from protofed.common.errors import SecureSumError
from protofed.common.payload import Array, SiteId
from protofed.common.secure_aggregation.context import SumContext, Vector, site_list
from protofed.common.secure_aggregation.keys import Roster, SiteSecrets, agreed, commitment, mask_key, public_bytes
from protofed.common.secure_aggregation.masks import add_mask, derived
from protofed.common.secure_aggregation.shamir import combined


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
        SecureSumError: there are too few shares, or they do not give the seeds that were promised.
    """
    dropped = [site for site in masks.included if site not in survivors]
    shares = {
        masks.roster.places[by]: [told.self_seeds[site] for site in survivors]
        + [told.mask_seeds[site] for site in dropped]
        for by, told in revealed.items()
        if told.self_seeds.keys() == set(survivors) and told.mask_seeds.keys() == set(dropped)
    }
    promised = [partial(_is_self_seed, masks, site) for site in survivors]
    promised += [partial(_is_mask_seed, masks, site) for site in dropped]
    seeds = dict(zip([*survivors, *dropped], combined(shares, masks.roster.threshold, promised), strict=True))
    found = {site: seed for site, seed in seeds.items() if seed is not None}
    if len(found) < len(seeds):
        raise SecureSumError("false-shares", _who_lied(masks, sorted(seeds.keys() - found.keys()), found, revealed))
    return Opened({site: found[site] for site in survivors}, {site: found[site] for site in dropped})


def _who_lied(masks: Masks, failed: Sequence[SiteId], found: Collection[SiteId], revealed: Collection[SiteId]) -> str:
    """As far as it can be known: a site dealt false shares of its seed, or too many revealed false ones of it."""
    many = len(revealed) - masks.roster.threshold + 1
    liars = f"{many} or more of {', '.join(sorted(revealed))} revealed false ones"
    if not found:  # of all seeds at once
        return f"the shares that sites revealed give no seed that was promised: {liars}"
    names = ", ".join(failed)
    return f"the shares of {names} do not give what {names} promised: dealt false, or {liars}; those of all others do"


def check_opened(masks: Masks, survivors: Sequence[SiteId], seeds: Opened) -> None:
    """Check seeds that somebody else combined against what their sites promised.

    Raises:
        SecureSumError: they are not those of these survivors and of those that dropped out.
    """
    sound = (
        seeds.self_seeds.keys() == set(survivors)
        and seeds.mask_seeds.keys() == set(masks.included) - set(survivors)
        and all(_is_self_seed(masks, site, seed) for site, seed in seeds.self_seeds.items())
        and all(_is_mask_seed(masks, site, seed) for site, seed in seeds.mask_seeds.items())
    )
    if not sound:
        raise SecureSumError("false-shares", "the seeds that were opened are not those that the sites promised")


def unmasked(masks: Masks, survivors: Sequence[SiteId], vectors: Iterable[Array], seeds: Opened) -> Array:
    """The sum [N] uint64 of the survivors' numbers.

    Args:
        vectors: their masked ones, each read once.

    Raises:
        SecureSumError: there is no vector, or two are of different lengths.
    """
    total: Array | None = None
    for vector in vectors:
        if total is None:
            total = np.array(vector, dtype=np.uint64)
        elif len(vector) != len(total):
            raise SecureSumError("bad-vector", f"a vector of {len(vector)} numbers among those of {len(total)}")
        else:
            total += vector
    if total is None:
        raise SecureSumError("too-few-sites", "no vector to sum")
    for site in survivors:
        add_mask(total, masks.own_key(site, seeds.self_seeds[site]), subtract=True)
    for site, seed in seeds.mask_seeds.items():
        # The survivors' halves of the masks that they had with it: its own ones, had it sent them, would cancel these.
        _add_pairs(total, masks, site, mask_key(masks.context, site, masks.vector, seed), survivors)
    return total


def _is_self_seed(masks: Masks, site: SiteId, seed: bytes) -> bool:
    """Whether it is the one that the site promised."""
    promised = masks.roster.by_site[site].commitments[masks.context.vectors.index(masks.vector)]
    return commitment(masks.context, site, masks.vector, seed) == promised


def _is_mask_seed(masks: Masks, site: SiteId, seed: bytes) -> bool:
    """Whether it gives the mask key that the site advertised."""
    private = mask_key(masks.context, site, masks.vector, seed)
    return public_bytes(private) == masks.roster.mask_key(site, masks.vector)


def _add_pairs(total: Array, masks: Masks, site: SiteId, private: X25519PrivateKey, others: Iterable[SiteId]) -> None:
    """Add a site's halves of the masks that it has with others: of each pair the first adds, the second subtracts."""
    for other in others:
        if other != site:
            add_mask(total, masks.pair_key(site, private, other), subtract=site > other)
