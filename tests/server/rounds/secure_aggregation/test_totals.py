"""Which recipes may run under secure aggregation, what the sites of a round are then, and what a real server says."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from protofed.common.config.recipe import Federation, Recipe, parse
from protofed.common.errors import ConfigError
from protofed.deploy.shipped import read_overrides, with_overrides
from protofed.server.rounds.context import build_method
from protofed.server.rounds.machine.rules import cohort_size, compute_quorum
from protofed.server.rounds.secure_aggregation.totals import check_secure
from protofed.testing.small_recipe import small_recipe

SECURE = {"min_sites": 3, "secure": True}


def federation(**keys: Any) -> Federation:
    return small_recipe("fedavg", federation={**SECURE, **keys}).federation


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"min_sites": 2}, "min_sites = 2"),
        ({"quorum": 2}, "quorum = 2"),
        ({"quorum": 51}, "quorum asks for 51"),
        ({"required_sites": [f"site-{n}" for n in range(51)]}, "required_sites asks for 51"),
        ({"outlier_factor": 10.0}, "outlier_factor"),
        ({"sum_bits": 1}, "unknown key .federation.sum_bits"),  # how numbers are rounded is no server's to choose
        ({"secure": False, "sum_group": 1}, "sum_group is for"),
        ({"sum_group": 2}, "sum_group = 2: expected 3 to min_sites"),
        ({"sum_group": 5}, "sum_group = 5: expected 3 to min_sites"),
    ],
)
def test_a_recipe_that_cannot_be_aggregated_is_refused_when_it_is_read(keys: dict[str, Any], why: str) -> None:
    table = small_recipe("fedavg").model_dump(exclude={"federation"})
    with pytest.raises(ConfigError, match=why):
        parse({**table, "federation": {**SECURE, **keys}}, Recipe, "r.toml")


def test_nobody_compares_norms_and_a_share_of_a_sum_is_of_a_sum() -> None:
    rules = federation()
    assert rules.outlier_factor is None
    plain = small_recipe("fedavg")
    assert plain.federation.outlier_factor is not None
    assert with_overrides(plain, read_overrides(["federation.secure=true"])).federation.outlier_factor is None
    assert rules.fixed_point is not None
    assert (rules.fixed_point.limit, rules.fixed_point.bits, rules.fixed_point.most) == (65536.0, 40, 50)
    assert Federation().fixed_point is None
    assert [compute_quorum(rules, size) for size in (3, 4, 10)] == [3, 3, 5]
    assert [cohort_size(rules, range(sites)) for sites in (3, 50, 51, 500)] == [3, 50, 50, 50]


def test_it_is_read_again_as_it_was() -> None:
    recipe = small_recipe("fedavg", federation=SECURE)
    again = Recipe.model_validate_json(recipe.wire())
    assert again.federation == recipe.federation
    assert again.fingerprint() == recipe.fingerprint()


@pytest.mark.parametrize(
    "method",
    [{"name": "solo"}, {"name": "fednh", "prototypes": "similarity"}, {"name": "cwfedavg"}],
    ids=lambda method: str(method["name"]),
)
def test_a_method_without_a_linear_form_is_refused_when_the_run_is_started(method: dict[str, Any]) -> None:
    recipe = small_recipe(method["name"], method=method, federation=SECURE)
    with pytest.raises(ConfigError, match="(?i)" + method["name"]):
        check_secure(recipe, build_method(recipe))
    plain = small_recipe(method["name"], method=method)
    check_secure(plain, build_method(plain))


def test_more_classes_than_sites_can_count_the_contributors_of_are_refused() -> None:
    for name, refused in (("fednh", True), ("cwfedavg-private", True), ("fedavg", False)):
        recipe = small_recipe(name, federation=SECURE).model_copy(update={"classes": 10_001})
        with pytest.raises(ConfigError, match="10001 classes") if refused else nullcontext():
            check_secure(recipe, build_method(recipe))
