"""Every score says what it discloses, and those of a site's own data are told from an evaluator's."""

from __future__ import annotations

import pytest

from protofed.client.policy.rules import discloses, is_own, on_own_images, tells_of_classes
from protofed.common.protocol.messages import Role
from protofed.common.protocol.scores import SCALARS

NOTHING = discloses("global.accuracy")


@pytest.mark.parametrize("name", sorted(SCALARS))
def test_exactly_scores_of_the_sites_own_disclose_something_of_it(name: str) -> None:
    assert is_own(name) == (not name.startswith("global.") or name.startswith("global.local."))
    assert tells_of_classes(name) == (is_own(name) and name != "loss")
    assert (discloses(name) == NOTHING) == (not is_own(name))
    assert discloses(name).endswith(".")


def test_a_score_of_a_class_discloses_what_its_family_does() -> None:
    assert discloses("personal.local.recall.3") == discloses("personal.local.recall") != discloses("personal.recall")
    assert is_own("personal.recall.3")
    assert not is_own("global.recall.3")


def test_a_number_of_a_plugins_own_is_the_sites() -> None:
    assert is_own("train.drift")
    assert discloses("train.drift") != NOTHING


@pytest.mark.parametrize("roles", [{Role.TRAINER}, {Role.EVALUATOR}, set(Role)])
def test_an_evaluators_scores_are_on_a_sites_own_images_only_if_it_trains_too(roles: set[Role]) -> None:
    found = on_own_images(roles, {"global.accuracy", "global.majority", "global.local.accuracy", "loss"})
    assert found == (["global.accuracy", "global.majority"] if len(roles) == 2 else [])
