"""One site that lies owns neither the model nor what is told of it."""

from __future__ import annotations

import pytest
from tests.attacks import lying_site
from tests.attacks.policies import NONE, UPDATES


def test_no_run_begins_with_a_first_model_that_one_site_made_up() -> None:
    assert lying_site.first_model().recovered == 0


@pytest.mark.parametrize("policy", ["open", UPDATES])
def test_no_honest_site_trains_on_a_first_model_that_two_colluders_made_up(policy: str) -> None:
    colluders, trained, why = lying_site.agreed_first_model(policy)
    assert trained <= colluders
    assert f"if the rule is about the first model, {' and '.join(sorted(colluders))} made it" in why


def test_a_policy_without_the_check_trains_on_what_two_colluders_made_up() -> None:
    colluders, trained, _ = lying_site.agreed_first_model(NONE)
    assert trained - colluders


def test_a_claimed_count_weighs_as_much_as_a_large_site() -> None:
    assert lying_site.claimed_count() < 0.6


def test_a_scaled_update_is_in_no_model() -> None:
    assert lying_site.scaled_update().recovered == 0


def test_a_scaled_update_is_in_every_sum() -> None:
    """No server can look for one under secure aggregation: only a site's own code bounds what it adds."""
    assert lying_site.scaled_update(secure=True).recovered == 5


def test_a_claimed_count_weighs_as_much_as_it_says_in_a_sum() -> None:
    """Nobody sees it: recipes whose sites may lie weigh all sites alike."""
    assert lying_site.claimed_count(secure=True) > 0.99


def test_forged_scores_are_not_stored() -> None:
    assert lying_site.forged_scores().recovered == 0
