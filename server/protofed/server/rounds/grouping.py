"""Which sites are summed together: groups for all runs, drawn of those that come, and cohorts of whole ones.

See `common.secure_sums.groups` for what they are good for. A run without secure sums has groups of one site.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from blake3 import blake3

from protofed.common.config.recipe import Recipe
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import MAX_SUMMED
from protofed.common.secure_aggregation.groups import Groups, alone, in_order, large, members
from protofed.server.rounds.phases import Sites
from protofed.server.rounds.sampling import Sampler

DISSOLVED = (
    "if that stays so, `protofed sites regroup {}` dissolves it, and a person at each of its sites runs "
    "`protofed client consortium forget-group`"
)


@dataclass(frozen=True)
class Grouping:
    """How a run forms groups of sites that have none: a pure function of its seed and of them, so that a restarted
    server forms the same.

    Attributes:
        fewest: sites of a group; one that the run forms has fewer than twice as many. Smaller ones, of other runs, are
            not summed. 1: a site without a group is summed alone, and goes on without one.
    """

    run: str
    seed: int
    fewest: int = 1

    @classmethod
    def of_run(cls, recipe: Recipe) -> Grouping | None:
        """That of a run; None: it has no secure sums."""
        rules = recipe.federation
        return cls(recipe.name, recipe.seed, rules.sum_group) if rules.secure else None

    def formed(self, newcomers: Collection[SiteId]) -> Groups:
        """Groups of sites that have none, in a seeded order, of sizes as even as possible; none of too few sites."""
        count = len(newcomers) // self.fewest
        ranked = sorted(newcomers, key=lambda site: blake3(f"{self.seed}/{self.run}/{site}".encode()).digest())
        bounds = [number * len(ranked) // count for number in range(count + 1)] if count else []
        return in_order(ranked[low:high] for low, high in pairwise(bounds))

    def of(self, known: Groups, sites: Sites) -> Groups:
        """The groups of a sum of these sites, for either subject: whole ones that are known, and those of newcomers."""
        complete = (group for group in large(known, self.fewest) if sites.issuperset(group))
        return in_order([*complete, *self.formed(sites - members(known))])

    def begun(self, known: Groups, sites: Collection[SiteId]) -> Groups:
        """The groups of sums that have begun, of which those of these sites are: nobody is a newcomer any more."""
        single = alone(frozenset(sites) - members(known)) if self.fewest == 1 else ()
        return in_order([*large(known, self.fewest), *single])

    def drawn(self, known: Groups, available: Sites, required: Sites, size: int, sampler: Sampler, round: int) -> Sites:
        """A cohort of `size` of these sites or a few more, in whole groups, those of required sites first.

        Newcomers are drawn as the groups that they would form. No more are drawn than a secure sum takes.
        """
        units = {group[0]: frozenset(group) for group in self.of(known, available)}
        cohort: Sites = frozenset().union(*(unit for unit in units.values() if unit & required))
        left = sorted(first for first, unit in units.items() if not unit & required)
        for count in range(1, len(left) + 1):
            if len(cohort) >= size or len(cohort) + self.fewest > MAX_SUMMED:
                break
            (first,) = sampler(round, left, count) - sampler(round, left, count - 1)
            if len(cohort | units[first]) <= MAX_SUMMED:
                cohort |= units[first]
        return cohort


@dataclass(frozen=True)
class Stuck:
    """A group of which some sites are there and none is summed.

    Attributes:
        why: what keeps it from that.
        lacking: its sites that are not there; empty: it is too small.
        site: whom to name to `protofed sites regroup`: one that lacks, where one does.
    """

    why: str
    lacking: tuple[SiteId, ...]
    site: SiteId


def stuck(groups: Groups, sites: Sites, fewest: int) -> list[Stuck]:
    """The groups of which some sites are there and none is summed.

    Args:
        fewest: sites of a group.
    """
    found = list[Stuck]()
    for group in groups:
        named = f"the group {', '.join(group)}"
        if len(group) < fewest and sites.intersection(group):
            found.append(Stuck(f"{named} has {len(group)} sites, and the run's have {fewest} or more", (), group[0]))
        elif sites.intersection(group) and (lacking := tuple(sorted(set(group) - sites))):
            found.append(Stuck(f"{named} is without {', '.join(lacking)}", lacking, lacking[0]))
    return found


def left_out(groups: Groups, sites: Collection[SiteId], fewest: int) -> dict[SiteId, str]:
    """By site that is not summed with these others, what it waits for.

    Args:
        groups: of the server, those that this sum forms among them.
        fewest: sites of a group.
    """
    newcomers, reasons = frozenset(sites) - members(groups), dict[SiteId, str]()
    for group in groups:
        there = set(group).intersection(sites)
        if len(group) < fewest:
            text = f"its group is of {len(group)} sites, and the run's are of {fewest} or more"
            reasons |= dict.fromkeys(there, text)
        elif there and len(there) < len(group):
            lacking = ", ".join(sorted(set(group) - there))
            reasons |= dict.fromkeys(there, f"waits for {lacking}: its group is summed together, or not at all")
    if fewest == 1:
        return reasons
    more = fewest - len(newcomers)
    text = f"waits for {more} more new site{'s' * (more != 1)}: its sums are over groups of {fewest}"
    return reasons | dict.fromkeys(newcomers, text)
