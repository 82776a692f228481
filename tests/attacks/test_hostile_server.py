"""A server that chooses recipe, model and base gets no image and no count from a site under a policy for patients.

Each attack is run first on a site that allows everything: there it has to succeed, or the test would show nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.attacks import (
    counts_by_heads,
    hidden_traps,
    presence,
    private_mixture,
    rare_units,
    score_oracle,
    trap_weights,
)
from tests.attacks.outcome import Outcome
from tests.attacks.policies import NONE, PERCEPTRONS, SHIPPED, UPDATES
from tests.attacks.score_questions import Rule, without

Attack = Callable[[str], Outcome]
FOR_PATIENTS = ("standard", "strict", UPDATES)
TRAPS: tuple[Attack, ...] = (
    trap_weights.one_large_step,
    trap_weights.honest_plan,
    hidden_traps.perceptron,
    hidden_traps.convolutional,
)
RARE: tuple[Attack, ...] = (
    rare_units.perceptron,
    rare_units.perceptron_in_part,
    rare_units.convolutional,
    rare_units.convolutional_in_part,
    rare_units.convolutional_by_class,
)
COUNTS: tuple[Attack, ...] = (
    counts_by_heads.blind_body,
    counts_by_heads.blind_input,
    counts_by_heads.tiny_step,
    counts_by_heads.least_movement,
    counts_by_heads.tiny_step_of_findings,
    counts_by_heads.least_movement_of_findings,
)


def name_of(attack: Attack) -> str:
    return f"{attack.__module__.rpartition('.')[2]}.{attack.__name__}"


@pytest.mark.parametrize("attack", [*TRAPS, *RARE, *COUNTS, presence.still_rows], ids=name_of)
def test_it_succeeds_on_a_site_without_rules(attack: Attack) -> None:
    assert attack(NONE).recovered > 0


@pytest.mark.parametrize("attack", [trap_weights.noisy_step, trap_weights.noisy_plan], ids=name_of)
def test_noise_leaves_no_image_where_nothing_else_stands_in_the_way(attack: Callable[..., Outcome]) -> None:
    clipped = attack(NONE, noise=1e-9)  # clipping alone stops nothing
    assert clipped.recovered > 20
    noisy = attack(NONE)
    assert not noisy.silent
    assert noisy.recovered == 0


@pytest.mark.parametrize("policy", FOR_PATIENTS)
@pytest.mark.parametrize("attack", [*TRAPS, *RARE], ids=name_of)
def test_no_image_comes_back(attack: Attack, policy: str) -> None:
    assert attack(policy).recovered == 0


@pytest.mark.parametrize("attack", TRAPS, ids=name_of)
def test_no_trap_passes_the_checks_of_a_base(attack: Attack) -> None:
    """Not by the list of models: perceptrons are allowed."""
    assert attack(PERCEPTRONS).recovered == 0


@pytest.mark.parametrize("attack", [trap_weights.one_large_step, trap_weights.honest_plan], ids=name_of)
def test_the_plainest_traps_are_refused_where_data_are_public(attack: Attack) -> None:
    assert attack("open").silent


def test_most_units_that_few_images_wake_leave_as_received() -> None:
    """Of a perceptron; what stays are images that stand out among many others (docs/explanation/privacy.md)."""
    assert rare_units.perceptron_in_part(PERCEPTRONS).recovered < rare_units.perceptron_in_part("open").recovered / 2


@pytest.mark.parametrize("policy", [*FOR_PATIENTS, PERCEPTRONS])
@pytest.mark.parametrize("attack", COUNTS, ids=name_of)
def test_no_label_count_comes_back(attack: Attack, policy: str) -> None:
    assert attack(policy).recovered == 0


@pytest.mark.parametrize("policy", [*FOR_PATIENTS, PERCEPTRONS])
def test_no_run_keeps_the_rows_of_absent_classes_still(policy: str) -> None:
    assert presence.still_rows(policy).silent


def test_constant_models_tell_all_shares_without_the_rule() -> None:
    with without(Rule.CONSTANT):
        outcome = score_oracle.attack(NONE)
    assert outcome.recovered == outcome.of


@pytest.mark.parametrize("policy", [NONE, *SHIPPED, UPDATES])
def test_constant_models_score_nothing(policy: str) -> None:
    assert score_oracle.attack(policy).silent


@pytest.mark.parametrize("policy", [NONE, *SHIPPED, UPDATES])
@pytest.mark.parametrize("attack", [private_mixture.without_a_step, private_mixture.honest_plan], ids=name_of)
def test_class_heads_do_not_come_back_as_a_mixture(attack: Attack, policy: str) -> None:
    assert attack(policy).recovered == 0
