"""How many sites hold each row, opened for all of them before any row is sent: a row of too few is sent by nobody.

A server that lied about the counts could have a row that one site alone holds sent as the "sum" of it. So each site is
given all masked flags, each signed by its site, with the seeds that open them, and counts for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protofed.common.codec import digest
from protofed.common.errors import SecureSumError
from protofed.common.payload import Array, SiteId
from protofed.common.secure_aggregation.context import site_list
from protofed.common.secure_aggregation.keys import check_signature
from protofed.common.secure_aggregation.masking import Masks, Opened, check_opened, unmasked


def signed_vector(masks: Masks, vector: Array, identity: Ed25519PrivateKey) -> bytes:
    """A site's signature under its masked flags [N] uint64."""
    return identity.sign(_statement(masks, vector))


def check_vector(masks: Masks, site: SiteId, vector: Array, signature: bytes) -> None:
    """Check that masked flags are those that a site sent.

    Raises:
        SecureSumError: they are not.
    """
    check_signature(masks.roster.by_site[site].identity, signature, _statement(masks, vector), site)


def counted(
    masks: Masks,
    survivors: Sequence[SiteId],
    vectors: Mapping[SiteId, Array],
    signatures: Mapping[SiteId, bytes],
    seeds: Opened,
) -> Array:
    """The number of holders [N] int64 of each row, computed from what the sites sent.

    Raises:
        SecureSumError: something is not what its site sent or promised, or the sum is no count of these sites.
    """
    if not (set(survivors) == vectors.keys() == signatures.keys()):
        raise SecureSumError("other-survivors", "the masked flags are not those of the survivors")
    for site in survivors:
        check_vector(masks, site, vectors[site], signatures[site])
    check_opened(masks, survivors, seeds)
    counts = unmasked(masks, survivors, (vectors[site] for site in survivors), seeds).view(np.int64)
    if len(counts) and not 0 <= counts.min() <= counts.max() <= len(survivors):
        raise SecureSumError("bad-vector", "the numbers of holders are none: a site sent no flags")
    return counts


def _statement(masks: Masks, vector: Array) -> bytes:
    facts = (masks.roster.digest, masks.vector, site_list(masks.included), digest(vector.tobytes()))
    return masks.context.bind("holders", *facts)
