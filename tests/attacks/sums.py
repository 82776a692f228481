"""What comes out of the sums of a run under secure aggregation, of label counts and of images; and what without them.

The server has the total of each round, and none of what it is of. It chooses the base, and, where nothing forbids it,
whose updates are in which sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice

import numpy as np
from tests.attacks.counts_by_heads import blind_model, one_step_recipe, shares_told, whole
from tests.attacks.hostile_server import always, as_payload, honest_model, public_of, sites_of, updates
from tests.attacks.outcome import Outcome
from tests.attacks.policies import NONE
from tests.attacks.rare_units import raised
from tests.attacks.targets import CONVOLUTIONAL, PERCEPTRON, Floats, Target, between_neighbours, over_biases, recovered
from tests.attacks.trap_weights import sorted_thresholds

from protofed.common.config.recipe import Recipe
from protofed.common.errors import SecureAggregationError
from protofed.common.payload import Part, Payload, SiteId, Update, describe
from protofed.common.protocol.messages import MIN_SECURE_SITES
from protofed.common.secure_aggregation.groups import Groups, check_whole
from protofed.common.secure_aggregation.linear_form import POINT, SumForm, SumLayout, Sums
from protofed.deploy.simulation.simulation import site_names

FEDAVG = SumForm((Part.BODY, Part.HEAD))


def mean_of(sent: Sequence[Payload]) -> Payload:
    """What the server makes of the opened sum of these updates: all that it has of them."""
    layout = SumLayout.of(FEDAVG, describe(sent[0]), sent[0])
    words = [layout.words(Update("", payload), POINT) for payload in sent]
    sums = Sums.opened(layout, np.asarray(np.sum(words, axis=0, dtype=np.uint64)), POINT)
    return {part: sums.mean(part) for part in FEDAVG.means}


@dataclass(frozen=True)
class Counted:
    """Sites without rules that answer a blind body with one step: their label counts show."""

    recipe: Recipe
    base: Payload
    sent: Mapping[SiteId, Sequence[Payload]]  # each site's updates, by round, from the same base
    truth: Floats  # label counts, [n, C], in the sites' order

    @classmethod
    def of(cls, sites: int, rounds: int) -> Counted:
        recipe = one_step_recipe(NONE)
        assert recipe.data is not None
        data = recipe.data.model_copy(update={"partition": recipe.data.partition.model_copy(update={"sites": sites})})
        recipe = recipe.model_copy(update={"data": data})
        held, base = list(sites_of(recipe)), blind_model(recipe)
        answers = [updates(NONE, recipe, one, [always(base)] * rounds) for one in held]
        sent = dict(zip(site_names(sites), answers, strict=True))
        truth = np.stack([np.bincount(one.train.labels.numpy(), minlength=recipe.classes) for one in held])
        return cls(recipe, base, sent, truth.astype(np.float64))

    def without_sums(self) -> Outcome:
        """From each site's own update; recovered: sites whose counts are exact."""
        return self._judged([of_site[0] for of_site in self.sent.values()])

    def by_sums(self, cohorts: Sequence[Collection[SiteId]]) -> Outcome:
        """From the sums of these cohorts alone, one a round: whatever linear algebra makes of them for each site."""
        return self._judged(self.disaggregated(cohorts))

    def less(self, accomplices: int, group: int = 3) -> Outcome:
        """From one sum of each site's group, less what so many others of it told the server; or invented."""
        sites = list(self.sent)
        left = []
        for place in range(len(sites)):
            members = [self.sent[sites[(place + step) % len(sites)]][0] for step in range(group)]
            total, known = mean_of(members), members[group - accomplices :]
            left.append(_less(total, known, group))
        return self._judged(left)

    def disaggregated(self, cohorts: Sequence[Collection[SiteId]]) -> list[Payload]:
        """By site, what solves "these sites' updates add up to that"; the least such, where there are several."""
        means = [mean_of([self.sent[site][number] for site in cohort]) for number, cohort in enumerate(cohorts)]
        members = np.array([[float(site in cohort) for site in self.sent] for cohort in cohorts])
        solving = np.linalg.pinv(members) * members.sum(axis=1)  # [n, rounds], of means
        return [
            {
                part: {name: np.tensordot(row, np.stack([mean[part][name] for mean in means]), 1) for name in tensors}
                for part, tensors in means[0].items()
            }
            for row in solving
        ]

    def shares(self, sent: Payload) -> Floats:
        """Of classes, [C], as an update or a mean of updates tells them."""
        return shares_told(self.recipe, self.base, sent, public_of(self.recipe).test, 1)

    def _judged(self, sent: Sequence[Payload]) -> Outcome:
        pairs = zip(sent, self.truth, strict=True)
        exact = [np.array_equal(whole(self.shares(one), None), truth) for one, truth in pairs]
        return Outcome(sum(exact), len(exact))


def _less(total: Payload, known: Sequence[Payload], group: int) -> Payload:
    """The mean of the others of a group, by the mean of all and what some of them sent."""
    return {
        part: {
            name: (group * mean - sum(one[part][name] for one in known)) / (group - len(known))
            for name, mean in tensors.items()
        }
        for part, tensors in total.items()
    }


def all_but_one(sites: Collection[SiteId]) -> list[frozenset[SiteId]]:
    """All sites, then all but one, each in its turn: the cohorts whose sums differ by one site."""
    everyone = frozenset(sites)
    return [everyone, *(everyone - {site} for site in sorted(everyone))]


def signed_by_all(groups: Groups, cohorts: Iterable[Collection[SiteId]]) -> list[Collection[SiteId]]:
    """Those of these cohorts that the sites' own check lets them sign and reveal for."""

    def is_signed(cohort: Collection[SiteId]) -> bool:
        try:
            check_whole(groups, cohort, "survivors")
        except SecureAggregationError:
            return False
        return True

    return [cohort for cohort in cohorts if is_signed(cohort)]


def every_cohort(sites: Collection[SiteId]) -> Iterator[frozenset[SiteId]]:
    """All that a secure aggregation can be of."""
    for size in range(MIN_SECURE_SITES, len(sites) + 1):
        yield from map(frozenset, combinations(sorted(sites), size))


@dataclass(frozen=True)
class Trap:
    """A base of round 2 that makes updates of images."""

    target: Target
    lure: Callable[[Recipe, Payload], Payload]  # from the honest model of round 1
    read: Callable[[Floats, Floats], Floats]  # candidates for images from how rows and biases moved


def _raised(target: Target, share: float, recipe: Recipe, model: Payload) -> Payload:
    return raised(target, recipe, model, share)


TRAPS: Mapping[str, Trap] = {
    "sorted thresholds": Trap(PERCEPTRON, lambda recipe, _: sorted_thresholds(recipe), between_neighbours),
    "a perceptron that hardly any image wakes": Trap(PERCEPTRON, partial(_raised, PERCEPTRON, 1.0), over_biases),
    "a tenth of it": Trap(PERCEPTRON, partial(_raised, PERCEPTRON, 0.1), over_biases),
    "units behind convolutions that hardly any wakes": Trap(
        CONVOLUTIONAL, partial(_raised, CONVOLUTIONAL, 1.0), over_biases
    ),
}


def images(policy: str, trap: Trap, *, aggregated: bool, sites: int = 3) -> Outcome:
    """Recovered: images of these sites that come back from the sum of their updates; without sums, from each update."""
    recipe = trap.target.recipe()
    held, first = list(islice(sites_of(recipe), sites)), as_payload(honest_model(recipe))
    honest = [sent[0] for one in held if (sent := updates(policy, recipe, one, [always(first)]))]
    of = sum(len(one.train) for one in held)
    if len(honest) < sites:
        return Outcome(0, of, silent=True)
    base = trap.lure(recipe, mean_of(honest))
    lures = [always(first), always(base)]
    sent = [two[1] for one in held if len(two := updates(policy, recipe, one, lures)) > 1]
    if len(sent) < sites:
        return Outcome(0, of, silent=True)
    truth = np.concatenate([trap.target.features(recipe, base, one.train) for one in held])
    seen = [mean_of(sent)] if aggregated else sent
    candidates = np.concatenate([trap.read(*trap.target.moved(base, one)) for one in seen])
    return Outcome(recovered(candidates, truth), of)
