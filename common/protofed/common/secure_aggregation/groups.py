"""Groups of sites: a site is in one, in all runs, and a sum is over whole groups or is not opened.

The members of a group are then in exactly the same decrypted sums. Whatever is computed from all sums of all runs is
made of sums over whole groups. No difference of them is about fewer sites than a group has (So et al., "Securing Secure
Aggregation: Mitigating Multi-Round Privacy Leakage", AAAI 2023). Who colludes with the server is taken away from its
group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeAlias

from protofed.common.errors import SecureAggregationError
from protofed.common.payload import SiteId

Group: TypeAlias = tuple[SiteId, ...]  # sorted
Groups: TypeAlias = tuple[Group, ...]  # no site is in two; sorted
_FORGET = (
    "The agreed groups change if a site has left for good, or if a study needs larger groups. Then a person at "
    "each site runs `protofed client consortium --forget-group`"
)


def in_order(groups: Iterable[Iterable[SiteId]]) -> Groups:
    """Groups as they are sent and stored."""
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def alone(sites: Iterable[SiteId]) -> Groups:
    """Each site as a group of its own: any set of sites is made of whole ones."""
    return in_order([site] for site in sites)


def whole(groups: Groups, sites: Collection[SiteId]) -> frozenset[SiteId]:
    """Those of the sites whose group is complete among them."""
    present = frozenset(sites)
    return frozenset(site for group in groups if present.issuperset(group) for site in group)


def members(groups: Groups) -> frozenset[SiteId]:
    """All sites that are in a group."""
    return frozenset(site for group in groups for site in group)


def large(groups: Groups, fewest: int) -> Groups:
    """Those of so many sites."""
    return tuple(group for group in groups if len(group) >= fewest)


def summable(groups: Groups, sites: frozenset[SiteId], fewest: int) -> frozenset[SiteId]:
    """The sites that can be aggregated now: those of whole groups, and newcomers if they are enough for a group."""
    newcomers = sites - members(groups)
    return whole(large(groups, fewest), sites) | (newcomers if len(newcomers) >= fewest else frozenset())


def find_group(groups: Groups, site: SiteId) -> Group:
    """The site's group; empty: it is in none."""
    return next((group for group in groups if site in group), ())


def check_parts(groups: Groups, sites: Collection[SiteId]) -> None:
    """Check that each of these sites is in one group, and nobody else is in any.

    Raises:
        SecureAggregationError: they are not so grouped, or the groups are out of order.
    """
    grouped = [site for group in groups for site in group]
    if groups != in_order(groups) or () in groups or sorted(grouped) != sorted(sites):
        raise SecureAggregationError("other-group", "the groups do not hold each of the roster's sites once, in order")


def check_whole(groups: Groups, sites: Collection[SiteId], what: str) -> None:
    """Check that a set of sites is made of whole groups.

    Raises:
        SecureAggregationError: it splits one, whose sums would differ by the sites that are left out.
    """
    for group in groups:
        if (present := set(group).intersection(sites)) and len(present) < len(group):
            absent = ", ".join(sorted(set(group) - present))
            raise SecureAggregationError("broken-group", f"the {what} lack {absent} of the group {', '.join(group)}")


def check_own(groups: Groups, site: SiteId, pinned: Group | None, fewest: int) -> None:
    """Check a site's own group.

    Args:
        pinned: in which the site was aggregated before, in any run; None: in none, except alone.
        fewest: sites that recipe and policy ask for.

    Raises:
        SecureAggregationError: it is another one, or too small.
    """
    own = find_group(groups, site)
    if pinned is not None and own != pinned:
        raise SecureAggregationError(
            "other-group",
            f"the server puts this site into the group {', '.join(own)}, and had it in {', '.join(pinned)} before. "
            f"The difference of aggregates over both groups would tell about fewer sites. {_FORGET}",
        )
    if len(own) < fewest:
        small = f"this site's group has {len(own)} sites; expected {fewest} or more"
        raise SecureAggregationError("small-group", small if pinned is None else f"{small}. {_FORGET}")
