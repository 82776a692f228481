"""Who is invited: a pure function of (seed, round, available), so that a restarted server invites the same cohort."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Protocol

from blake3 import blake3

from protofed.common.config.recipe import Federation
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import MAX_SUMMED, MIN_SUMMED


class Sampler(Protocol):
    """Chooses `size` of the available sites for a round."""

    def __call__(self, round: int, available: Sequence[SiteId], size: int) -> frozenset[SiteId]:
        """The cohort; all of `available` if there are no more than `size`."""


@dataclass(frozen=True)
class Uniform:
    """Every cohort of a size is equally likely: sites are ranked by a hash of (seed, round, site).

    A rank does not depend on who else is available, so a site that joins or leaves changes one place of the cohort,
    and no library's generator can change a run.
    """

    seed: int

    def __call__(self, round: int, available: Sequence[SiteId], size: int) -> frozenset[SiteId]:
        """The `size` available sites of lowest rank."""
        ranked = sorted(available, key=lambda site: blake3(f"{self.seed}/{round}/{site}".encode()).digest())
        return frozenset(ranked[:size])


def quorum_of(federation: Federation, size: int) -> int:
    """Updates that a round of this size needs, or is abandoned."""
    quorum, least = federation.quorum, MIN_SUMMED if federation.secure else 1
    # Rounded first: 0.7 * 10 is 7.000000000000001 in floats, and would need an eighth site.
    return quorum if isinstance(quorum, int) else max(least, math.ceil(round(quorum * size, 9)))


def min_cohort(federation: Federation) -> int:
    """The least number of sites whose updates any round aggregates, as sites are told.

    A round opens with `min_sites` trainers at least, invites its share of them, and is abandoned below its quorum, also
    when updates were set aside after they had arrived. It never counts without its required sites.
    """
    least = cohort_size(federation, range(federation.min_sites))
    group = federation.sum_group if federation.secure else 1
    return max(quorum_of(federation, least), len(set(federation.required_sites)), group)


def cohort_size(federation: Federation, enrolled: Sized) -> int:
    """ceil(participation * K), at least 1, and no more than a secure sum takes, if there is one.

    The product is rounded first, for 0.07 * 100 is 7.000000000000001.
    """
    size = max(1, math.ceil(round(federation.participation * len(enrolled), 9)))
    return min(size, MAX_SUMMED) if federation.secure else size
