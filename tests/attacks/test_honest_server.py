"""What a server computes that keeps to every rule and forgets nothing."""

from __future__ import annotations

import pytest
from tests.attacks import counts_by_scores, presence
from tests.attacks.policies import NONE, UPDATES


def test_scores_and_updates_give_the_label_counts_of_sites_without_rules() -> None:
    assert counts_by_scores.attack(NONE).recovered >= 3
    assert counts_by_scores.attack(NONE, secure=True).silent, "a site's own scores leave within sums alone"


@pytest.mark.parametrize("policy", ["standard", "strict", UPDATES])
def test_no_score_leaves_to_compute_counts_from(policy: str) -> None:
    assert counts_by_scores.attack(policy).silent


def test_prototypes_say_which_classes_a_site_has_unless_its_policy_hides_them() -> None:
    assert presence.rows_sent(NONE).recovered == presence.rows_sent(NONE).of
    assert presence.rows_sent("standard").silent
    assert presence.rows_sent("strict").silent
