"""The other tables of `make leakage`: attacks that were found on protofed 0.2.0, run again under every shipped policy.

A server that keeps what it gets, one that chooses recipe, model and base, and a site that lies. The first column says
what the attack came to on 0.2.0 under its standard.toml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.attacks import (
    counts_by_heads,
    counts_by_scores,
    hidden_traps,
    lying_site,
    presence,
    private_mixture,
    rare_units,
    score_oracle,
    sums,
    trap_weights,
)
from tests.attacks.outcome import Outcome
from tests.attacks.policies import PERCEPTRONS, UPDATES

POLICIES = (
    "open",
    UPDATES,
    "strict",
    PERCEPTRONS,
)  # `standard` as it is shipped declines runs without secure aggregation

COLUMNS = ("attack", "after", "0.2.0, standard", *POLICIES)


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        after: what it tries to learn.
        before: what it came to on 0.2.0 under standard.toml.
    """

    name: str
    after: str
    before: str
    run: Callable[[str], Outcome]


ON_SITES = (
    Attack("PM(L) of 20 rounds, with the updates", "label counts of sites", "4 of 5", counts_by_scores.attack),
    Attack("a round of scoring for each class, by its bias", "shares of classes", "50 of 50", score_oracle.attack),
    Attack("sorted thresholds, one large step", "images", "176 of 229", trap_weights.one_large_step),
    Attack("sorted thresholds, honest plan", "images", "23 of 229", trap_weights.honest_plan),
    Attack("one large step, with noise of epsilon 7.7", "images", "–", trap_weights.noisy_step),
    Attack("honest plan, with noise of epsilon 7.5", "images", "–", trap_weights.noisy_plan),
    Attack("a quarter of a perceptron's units as a trap", "images", "30 of 229", hidden_traps.perceptron),
    Attack("a quarter of the units behind convolutions", "images", "29 of 229", hidden_traps.convolutional),
    Attack("a perceptron that hardly any image wakes", "images", "144 of 229", rare_units.perceptron),
    Attack("a tenth of it", "images", "49 of 229", rare_units.perceptron_in_part),
    Attack("units behind convolutions that hardly any wakes", "images", "24 of 229", rare_units.convolutional),
    Attack("a tenth of them", "images", "13 of 229", rare_units.convolutional_in_part),
    Attack("units behind convolutions, classes drawn as often", "images", "–", rare_units.convolutional_by_class),
    Attack("a body that is blind", "label counts of sites", "4 of 5", counts_by_heads.blind_body),
    Attack("a window that makes all images black", "label counts of sites", "5 of 5", counts_by_heads.blind_input),
    Attack("a step too small to matter", "label counts of sites", "5 of 5", counts_by_heads.tiny_step),
    Attack("the smallest movement that is allowed", "label counts of sites", "5 of 5", counts_by_heads.least_movement),
    Attack("a step too small, of sigmoids", "counts of findings", "–", counts_by_heads.tiny_step_of_findings),
    Attack("the smallest movement, of sigmoids", "counts of findings", "–", counts_by_heads.least_movement_of_findings),
    Attack(
        "class heads that are unit vectors, no step", "shares of classes", "26 of 26", private_mixture.without_a_step
    ),
    Attack("class heads that are unit vectors", "shares of classes", "19 of 26", private_mixture.honest_plan),
    Attack("which prototypes are sent", "classes of sites", "21 of 26", presence.rows_sent),
    Attack("rows of the head that stay, by the balanced softmax", "classes of sites", "–", presence.still_rows),
)


@dataclass(frozen=True)
class Lie:
    """One lie of a site to an honest server, whatever the policies of the others."""

    name: str
    before: str
    run: Callable[[], str]


ON_THE_SERVER = (
    Lie("a first model of zeros begins the run", "1 of 1", lambda: str(lying_site.first_model())),
    Lie("share of the model of a site that claims 9e15 examples", "100 %", lambda: f"{lying_site.claimed_count():.0%}"),
    Lie("the same under secure aggregation, 6e10", "–", lambda: f"{lying_site.claimed_count(secure=True):.0%}"),
    Lie("rounds with an update scaled by 60", "3 of 5", lambda: str(lying_site.scaled_update())),
    Lie("the same under secure aggregation", "–", lambda: str(lying_site.scaled_update(secure=True))),
    Lie("forged scores that are stored", "2004 of 2004", lambda: str(lying_site.forged_scores())),
)


def rows() -> list[list[str]]:
    """Run all of it, minutes; the table's rows."""
    found = [
        [attack.name, attack.after, attack.before, *(str(attack.run(policy)) for policy in POLICIES)]
        for attack in ON_SITES
    ]
    return found + [[lie.name, "–", lie.before, *[lie.run()] * len(POLICIES)] for lie in ON_THE_SERVER]


SUM_COLUMNS = (
    "base of round 2",
    "open: three updates",
    "open: their sum",
    "standard, perceptrons allowed: three updates",
    "standard, perceptrons allowed: their sum",
)


def sum_rows() -> list[list[str]]:
    """Images that come back of three sites, from their updates and from the sum of them; the third table's rows."""
    asked = [(policy, aggregated) for policy in ("open", PERCEPTRONS) for aggregated in (False, True)]
    return [
        [name, *(str(sums.images(policy, trap, aggregated=aggregated)) for policy, aggregated in asked)]
        for name, trap in sums.TRAPS.items()
    ]
