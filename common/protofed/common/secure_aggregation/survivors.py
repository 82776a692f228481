"""The set of sites whose masked vectors are summed: agreed by signatures before anything is revealed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protofed.common.errors import SecureSumError
from protofed.common.payload import SiteId
from protofed.common.secure_aggregation.context import site_list
from protofed.common.secure_aggregation.keys import check_members, check_signature
from protofed.common.secure_aggregation.masking import Masks, Revealed
from protofed.common.secure_aggregation.shares import SharesOfSite


def signed(masks: Masks, survivors: Sequence[SiteId], identity: Ed25519PrivateKey) -> bytes:
    """A site's signature under the survivors; it signs one set for each vector, and never another.

    Raises:
        SecureSumError: they are too few, split a group, or are not among those that are masked.
    """
    check_survivors(masks, survivors)
    return identity.sign(_statement(masks, survivors))


def check_survivors(masks: Masks, survivors: Sequence[SiteId]) -> None:
    """Check that survivors are enough, whole groups, and all of those whose masks are in.

    Raises:
        SecureSumError: they are not.
    """
    check_members(masks.roster, survivors, "survivors")
    if not set(survivors) <= set(masks.included):
        raise SecureSumError("other-survivors", "a survivor is not among the sites that dealt shares")


def check_signatures(masks: Masks, survivors: Sequence[SiteId], signatures: Mapping[SiteId, bytes]) -> None:
    """Check that so many survivors have signed this set that no other one can have as many.

    Raises:
        SecureSumError: there are too few signatures, or one is false.
    """
    check_survivors(masks, survivors)
    if not signatures.keys() <= set(survivors) or len(signatures) < masks.roster.threshold:
        raise SecureSumError(
            "too-few-sites", f"{len(signatures)} survivors agreed on who they are; {masks.roster.threshold} are needed"
        )
    statement = _statement(masks, survivors)
    for site, signature in signatures.items():
        check_signature(masks.roster.by_site[site].identity, signature, statement, site)


def check_signed(masks: Masks, survivors: Sequence[SiteId], site: SiteId, signature: bytes) -> None:
    """Check that a site of the roster has signed these survivors.

    Raises:
        SecureSumError: it has not.
    """
    check_signature(masks.roster.by_site[site].identity, signature, _statement(masks, survivors), site)


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


def _statement(masks: Masks, survivors: Sequence[SiteId]) -> bytes:
    facts = (masks.roster.digest, masks.vector, site_list(masks.included), site_list(survivors))
    return masks.context.bind("survivors", *facts)
