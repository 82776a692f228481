"""A preview refuses a run that moves models between single sites by the rule `exchange`, as the site's gate does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.deploy.site.test_plan import policy

from protofed.common.config.recipe import Recipe
from protofed.common.payload import Exchange
from protofed.deploy.site.plan import site_plan


@pytest.mark.parametrize("missing", sorted(Exchange))
def test_what_a_policy_does_not_exchange_is_refused_tensor_by_tensor(
    missing: Exchange, recipe_of: Callable[..., Recipe]
) -> None:
    recipe = recipe_of("fedamp")
    plan = site_plan(recipe, policy("fedamp", exchange=set(Exchange) - {missing}))
    assert plan.refusals
    assert {tensor.refused_by for tensor in plan.outgoing} == {"exchange"}
    allowed = site_plan(recipe, policy("fedamp"))
    assert allowed.refusals == ()
    assert allowed.exchanges == plan.exchanges == frozenset(Exchange)
