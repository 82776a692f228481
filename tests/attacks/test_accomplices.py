"""How many partners must help the server before it can read one update: the table of docs/how-to/take-part.md.

Computed from what sites check: `threshold`, and `check_members` of a set of survivors. That sites refuse other sets,
and that `threshold` sites can read all, is in test_masking.py and in tests/client/secure_aggregation/test_session.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import combinations

import pytest

from protofed.common.secure_aggregation.groups import Groups, find_group
from protofed.common.secure_aggregation.keys import helpers_outside, helpers_within, threshold

PAGE = {3: (2, 2), 4: (2, 3), 5: (2, 4), 6: (2, 5), 10: (2, 7)}  # hospitals: with groups of three; with one group


def split(sites: int, group: int) -> Groups:
    """Sites 0, 1, … in groups of so many, or a few more in the last."""
    names = [f"{site:02}" for site in range(sites)]
    starts = range(0, sites - group + 1, group)
    return tuple(tuple(names[start : start + group if start != starts[-1] else sites]) for start in starts)


def unions(groups: Groups) -> Iterator[frozenset[str]]:
    """All sets that are made of whole groups."""
    for size in range(1, len(groups) + 1):
        for some in combinations(groups, size):
            yield frozenset(site for group in some for site in group)


def lies(groups: Groups, victim: str, helping: Collection[str]) -> bool:
    """Whether honest sites can be told two sets of survivors, with the victim and without, each signed by enough."""
    names = frozenset(site for group in groups for site in group)
    needed, honest = threshold(len(names)), names - frozenset(helping)
    signable = [alive for alive in unions(groups) if len(alive) >= needed]
    for one in (alive for alive in signable if victim in alive):
        for other in (alive for alive in signable if victim not in alive):
            most = [needed - len(alive.intersection(helping)) for alive in (one, other)]
            here, there = (max(0, count) for count in most)
            if (
                here <= len(honest & one)
                and there <= len(honest & other)
                and here + there <= len(honest & (one | other))
            ):
                return True
    return False


def reads(groups: Groups, victim: str, helping: Collection[str]) -> bool:
    """By subtraction in a round over the victim's group alone, by enough shares of every secret, or by a lie."""
    sites = sum(map(len, groups))
    others = set(find_group(groups, victim)) - {victim}
    return others.issubset(helping) or len(helping) >= threshold(sites) or lies(groups, victim, helping)


def fewest(groups: Groups, helpers: Collection[str] | None = None) -> int:
    """The least number of helpers, chosen among all other sites or among `helpers`."""
    victim = groups[0][0]
    others = [site for group in groups for site in group if site != victim] if helpers is None else helpers
    return next(
        count
        for count in range(1, len(others) + 1)
        if any(reads(groups, victim, helping) for helping in combinations(others, count))
    )


@pytest.mark.parametrize("sites", PAGE)
def test_so_many_partners_must_help_the_server(sites: int) -> None:
    """With `sum_group = 3` the server may form a group of three, and a round may have this group alone."""
    assert (fewest(split(3, 3)), fewest(split(sites, sites))) == PAGE[sites]
    assert fewest(split(sites, 3)) >= 2
    assert helpers_within(sites) == PAGE[sites][1]


@pytest.mark.parametrize("sites", range(3, 10))
def test_up_to_nine_sites_no_lie_about_who_is_missing_helps(sites: int) -> None:
    """A set without the victim lacks its whole group, and is then too small to be signed."""
    for groups in (split(sites, 3), split(sites, sites)):
        victim, *others = (site for group in groups for site in group)
        assert not lies(groups, victim, others)
    assert helpers_outside(3, sites) is None


def test_of_ten_in_groups_of_three_four_of_other_groups_are_enough() -> None:
    groups = split(10, 3)
    assert fewest(groups, [site for group in groups[1:] for site in group]) == helpers_outside(3, 10) == 4


@pytest.mark.parametrize(("sites", "count"), [(4, 2), (5, 3), (10, 4)])
def test_where_each_site_is_a_group_of_its_own_fewer_are_enough(sites: int, count: int) -> None:
    """So with `sum_group = 1`: 2t - n."""
    victim, *others = (site for group in split(sites, 1) for site in group)
    found = [lies(split(sites, 1), victim, others[:helping]) for helping in (count - 1, count)]
    assert found == [False, True]
