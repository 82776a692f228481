"""The rules of a run, from its recipe: what a round needs, who is invited, who is aggregated with whom.

Pure functions of seed, round and sites, so that a restarted server invites the same cohort and forms the same groups.
`common.secure_aggregation.groups` says what groups are for; a run without secure aggregation has groups of one site.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from blake3 import blake3

from protofed.common import plugins
from protofed.common.config.recipe import MODELS, Federation, Recipe
from protofed.common.errors import ConfigError, nearest
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import MAX_SECURE_SITES, MIN_SECURE_SITES
from protofed.common.secure_aggregation.groups import Groups, alone, in_order, large, members, summable
from protofed.server.rounds.machine import phases
from protofed.server.rounds.machine.phases import Plateau, Sites

AGREEING = 2  # a first model that one site alone made would be whatever that site sent
DISSOLVED = (
    "if that stays so, `protofed sites regroup {}` dissolves it, and a person at each of its sites runs "
    "`protofed client consortium --forget-group`"
)


@dataclass(frozen=True)
class RoundRules:
    """What stays the same for a whole run."""

    rounds: int
    federation: Federation
    sampler: Sampler
    in_time: bool = True  # a simulation's clock stands still
    secure: bool = False  # sites are asked for masked numbers, in place of updates
    contributors: bool = False  # they count who holds which class before
    refined: bool = False  # an evaluator makes of each round's aggregate the state that is published
    grouping: Grouping | None = None  # of the sites of secure aggregation, a simulation's too

    @classmethod
    def of(cls, recipe: Recipe, *, simulated: bool, contributors: bool, refined: bool) -> RoundRules:
        """The rules of a run; a simulation's clock stands still, and its sites are asked for updates."""
        rules, secure = recipe.federation, recipe.federation.secure and not simulated
        sampler = Uniform(recipe.seed)
        return cls(recipe.rounds, rules, sampler, not simulated, secure, contributors, refined, Grouping.of_run(recipe))

    def pause(self, round: int, tries: int) -> float:
        """Seconds before the next attempt: exponential, so that sites that decline do not use up all attempts at once.

        Round 0 tries again at once the first time, since that attempt asks all sites instead of two. Its later pauses
        are twice a training round's: 280 s in all by default. With 150 s its attempts would be used up sooner.
        """
        if not self.in_time or (round == 0 and tries == 1):
            return 0.0
        doublings = tries if round else tries + 1
        # 32: 2**doublings overflows no float, and any heartbeat times 2**32 is far beyond the deadline.
        return min(self.federation.heartbeat_s * 2.0 ** min(doublings, 32), self.federation.deadline_s)

    @property
    def first_models(self) -> int:
        """Sites that must make the same first model; one, where a single site may make up a round or a class."""
        return 1 if min(self.federation.min_sites, self.federation.min_contributors) == 1 else AGREEING

    def early_end(self, done: int, plateau: Plateau | None) -> str:
        """Why the run ends after round `done`, though the recipe has more; empty: it goes on."""
        rules = self.federation
        if rules.patience is None or plateau is None or plateau.rounds < rules.patience:
            return ""
        by = f" by {rules.min_improvement:g}" if rules.min_improvement else ""
        return f"stopped early after round {done}: {plateau.score} no better{by} since round {plateau.since}"

    def check_continues(self, done: int, plateau: Plateau | None) -> None:
        """Check that a run that is taken back to round `done` has a round before it.

        Raises:
            ConfigError: it would end there at once.
        """
        if done >= self.rounds:
            raise ConfigError(
                f"round {done} is the last round of the run's recipe, so no round would follow it. To train on, go "
                "back to an earlier round. To use its model, export it"
            )
        if early := self.early_end(done, plateau):
            raise ConfigError(f"from round {done} the run would end again at once: {early}; go back to that round")

    @property
    def fewest(self) -> int:
        """Sites that come newly and count: a group of them."""
        return 1 if self.grouping is None else self.grouping.fewest

    def countable(self, groups: Groups, sites: Sites) -> Sites:
        """Those of the sites whose updates could count together now."""
        return summable(groups, sites, self.fewest)

    def trainers_needed(self, round: int, enrolled: Sites) -> int:
        """Trainers that must be alive before the round is opened; `enrolled` are those of whom it needs a share."""
        if round == 0:
            return self.first_models
        quorum = compute_quorum(self.federation, cohort_size(self.federation, enrolled))
        return max(self.federation.min_sites, quorum, len(set(self.federation.required_sites)))

    def owns_due(self, round: int) -> bool:
        """Whether trainers take their own scores after this round."""
        every, personal = self.federation.score_every, self.federation.score_personal_every
        return self.due(round, every if personal is None else personal)

    def due(self, round: int, every: int) -> bool:
        """Whether scores are taken after this round; 0: only after the last one."""
        return round > 0 and (round == self.rounds or (every > 0 and round % every == 0))


class Sampler(Protocol):
    """Chooses `size` of the available sites for a round."""

    def __call__(self, round: int, available: Sequence[SiteId], size: int) -> frozenset[SiteId]:
        """The cohort; all of `available` if there are no more than `size`."""


@dataclass(frozen=True)
class Uniform:
    """Every cohort of a size is equally likely: sites are ranked by a hash of (seed, round, site).

    A rank does not depend on who else is available. So a site that joins or leaves changes one place of the cohort, and
    no library's generator can change a run.
    """

    seed: int

    def __call__(self, round: int, available: Sequence[SiteId], size: int) -> frozenset[SiteId]:
        """The `size` available sites of lowest rank."""
        ranked = sorted(available, key=lambda site: blake3(f"{self.seed}/{round}/{site}".encode()).digest())
        return frozenset(ranked[:size])


def compute_quorum(federation: Federation, size: int) -> int:
    """Updates that a round of this size needs, or is abandoned."""
    quorum, least = federation.quorum, MIN_SECURE_SITES if federation.secure else 1
    # Rounded first: 0.7 * 10 is 7.000000000000001 in floats, and would need an eighth site.
    return quorum if isinstance(quorum, int) else max(least, math.ceil(round(quorum * size, 9)))


def min_cohort(federation: Federation) -> int:
    """The least number of sites whose updates any round aggregates, as sites are told.

    A round opens with `min_sites` trainers at least, and invites its share of them. It is abandoned below its quorum,
    also if updates were rejected after they had arrived. It never counts without its required sites.
    """
    least = cohort_size(federation, range(federation.min_sites))
    group = federation.sum_group if federation.secure else 1
    return max(compute_quorum(federation, least), len(set(federation.required_sites)), group)


def cohort_size(federation: Federation, enrolled: Sized) -> int:
    """ceil(participation * K), at least 1, and no more than a secure aggregation takes, if there is one.

    The product is rounded first, for 0.07 * 100 is 7.000000000000001.
    """
    size = max(1, math.ceil(round(federation.participation * len(enrolled), 9)))
    return min(size, MAX_SECURE_SITES) if federation.secure else size


@dataclass(frozen=True)
class Grouping:
    """How a run forms groups of sites without one: a pure function of its seed and the sites.

    So a restarted server forms the same groups.

    Attributes:
        fewest: sites of a group. A group that the run forms has fewer than twice as many. Smaller groups, of other
            runs, are not aggregated. 1: a site without a group is aggregated alone, and goes on without one.
    """

    run: str
    seed: int
    fewest: int = 1

    @classmethod
    def of_run(cls, recipe: Recipe) -> Grouping | None:
        """That of a run; None: it has no secure aggregation."""
        rules = recipe.federation
        return cls(recipe.name, recipe.seed, rules.sum_group) if rules.secure else None

    def formed(self, newcomers: Collection[SiteId]) -> Groups:
        """Groups of sites that have none, in a seeded order, of sizes as even as possible; none of too few sites."""
        count = len(newcomers) // self.fewest
        ranked = sorted(newcomers, key=lambda site: blake3(f"{self.seed}/{self.run}/{site}".encode()).digest())
        bounds = [number * len(ranked) // count for number in range(count + 1)] if count else []
        return in_order(ranked[low:high] for low, high in pairwise(bounds))

    def of(self, known: Groups, sites: Sites) -> Groups:
        """The groups of a sum over the sites, for either sum_of: whole known groups, and groups of newcomers."""
        complete = (group for group in large(known, self.fewest) if sites.issuperset(group))
        return in_order([*complete, *self.formed(sites - members(known))])

    def started(self, known: Groups, sites: Collection[SiteId]) -> Groups:
        """The groups of the sites, for sums that have started: nobody is a newcomer any more."""
        single = alone(frozenset(sites) - members(known)) if self.fewest == 1 else ()
        return in_order([*large(known, self.fewest), *single])

    def drawn(self, known: Groups, available: Sites, required: Sites, size: int, sampler: Sampler, round: int) -> Sites:
        """A cohort of `size` sites or a few more, in whole groups; groups of required sites first.

        Newcomers are drawn as the groups that they would form. No more are drawn than a secure aggregation takes.
        """
        units = {group[0]: frozenset(group) for group in self.of(known, available)}
        cohort: Sites = frozenset().union(*(unit for unit in units.values() if unit & required))
        optional = sorted(first for first, unit in units.items() if not unit & required)
        for count in range(1, len(optional) + 1):
            if len(cohort) >= size or len(cohort) + self.fewest > MAX_SECURE_SITES:
                break
            (first,) = sampler(round, optional, count) - sampler(round, optional, count - 1)
            if len(cohort | units[first]) <= MAX_SECURE_SITES:
                cohort |= units[first]
        return cohort


@dataclass(frozen=True)
class Stuck:
    """A group with some sites there that cannot be aggregated.

    Attributes:
        why: what prevents the aggregation.
        lacking: its sites that are not there; empty: it is too small.
        site: to name to `protofed sites regroup`: a lacking site, if one lacks.
    """

    why: str
    lacking: tuple[SiteId, ...]
    site: SiteId


def stuck(groups: Groups, sites: Sites, fewest: int) -> list[Stuck]:
    """The groups with some sites there that cannot be aggregated.

    Args:
        fewest: sites of a group.
    """
    dissolved = list[Stuck]()
    for group in groups:
        named = f"the group {', '.join(group)}"
        if len(group) < fewest and sites.intersection(group):
            dissolved.append(
                Stuck(f"{named} has {len(group)} sites, and the run's have {fewest} or more", (), group[0])
            )
        elif sites.intersection(group) and (lacking := tuple(sorted(set(group) - sites))):
            dissolved.append(Stuck(f"{named} is without {', '.join(lacking)}", lacking, lacking[0]))
    return dissolved


def left_out(groups: Groups, sites: Collection[SiteId], fewest: int) -> dict[SiteId, str]:
    """By site that is not aggregated with the others, what it waits for.

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
            reasons |= dict.fromkeys(there, f"waits for {lacking}: its group is aggregated as a whole, or not at all")
    if fewest == 1:
        return reasons
    more = fewest - len(newcomers)
    text = f"waits for {more} more new site{'s' * (more != 1)}: its sums are over groups of {fewest}"
    return reasons | dict.fromkeys(newcomers, text)


def check_model(recipe: Recipe) -> None:
    """Check that sites can know the model: by protofed's own name, as `package.module:factory`, or as a plug-in.

    Raises:
        ConfigError: it is none of them; the text has the nearest name.
    """
    name = recipe.model.name
    if name in MODELS or plugins.is_plugin(plugins.PluginKind.MODEL, name) or plugins.is_allowed(name):
        return
    similar = nearest(name, MODELS)
    hint = f"did you mean '{similar}'?" if similar else f"expected one of: {', '.join(MODELS)}."
    raise ConfigError(
        f"recipe '{recipe.name}': unknown model '{name}': {hint} A model of the sites' own is named as "
        "package.module:factory, or listed under `plugins` in the server's settings"
    )


def unmet(recipe: Recipe, trainers: phases.Sites, groups: Groups = ()) -> list[str]:
    """What rounds of this run need and these sites cannot give, a sentence each.

    Args:
        trainers: all that may take part, whether they are there now or not.
        groups: that sites have since earlier secure aggregations.
    """
    federation = recipe.federation
    grouping = Grouping.of_run(recipe)
    rules = RoundRules(recipe.rounds, federation, Uniform(recipe.seed), grouping=grouping)
    problems = []
    needed = max(rules.trainers_needed(number, trainers) for number in (0, 1))
    if len(trainers) < needed:
        listed = f": {', '.join(sorted(trainers))}" if trainers else ""
        counts = {"min_sites": federation.min_sites, "quorum": federation.quorum}
        settings = ", ".join(f"{key} = {value}" for key, value in counts.items() if isinstance(value, int))
        problems.append(
            f"{needed} trainers are needed ({settings}), and {len(trainers)} may take part{listed}; "
            "register or start the others, or lower these keys of [federation]"
        )
    elif grouping is not None and len(whole := rules.countable(groups, trainers)) < rules.trainers_needed(1, whole):
        problems += [f"{one.why}: {DISSOLVED.format(one.site)}" for one in stuck(groups, trainers, grouping.fewest)]
    for site in sorted(set(federation.required_sites) - trainers):
        similar = nearest(site, trainers)
        hint = f"did you mean '{similar}'?" if similar else "register it as a trainer, admit it, or leave it out"
        problems.append(f"required_sites names '{site}', which is no site that may train here: {hint}")
    return problems
