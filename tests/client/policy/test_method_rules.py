"""Rules about what a method moves between single sites, and about what it tells besides its numbers."""

from __future__ import annotations

import pytest
from tests.client.policy.test_policy import policy, shipped_policy

from protofed.client.method import client_methods
from protofed.client.policy.policy import Policy, PolicyRefusedError
from protofed.client.policy.update_checks import TELLS_STEPS
from protofed.common.payload import Exchange, Part
from protofed.common.secure_aggregation.linear_form import form_of

COUNTING = sorted(name for name in client_methods if client_methods.build(name, {}).sends & TELLS_STEPS)


@pytest.mark.parametrize("missing", sorted(Exchange))
def test_a_method_that_moves_models_between_sites_needs_a_rule_for_each_way(missing: Exchange) -> None:
    both = frozenset(Exchange)
    policy(exchange=sorted(both)).admit("fedavg", frozenset({Part.BODY}), exchanges=both)
    with pytest.raises(PolicyRefusedError, match=rf"no '{missing}' in exchange") as refused:
        policy(exchange=sorted(both - {missing})).admit("fedavg", frozenset({Part.BODY}), exchanges=both)
    assert refused.value.rule == "exchange"


@pytest.mark.parametrize(("name", "allowed"), [("strict", set()), ("standard", set()), ("open", set(Exchange))])
def test_only_the_open_policy_lets_models_move_between_single_sites(name: str, allowed: set[Exchange]) -> None:
    assert shipped_policy(name).rules.exchange == allowed


@pytest.mark.parametrize("method", COUNTING)
def test_what_tells_the_number_of_steps_leaves_in_no_sum_either(method: str) -> None:
    built, lax = client_methods.build(method, {}), {"methods": frozenset({method}), "parts": frozenset(Part)}
    standard = shipped_policy("standard")
    for count in (False, True):
        site = Policy(standard.rules.model_copy(update={**lax, "example_count": count}))
        refused: list[str] = []
        try:
            site.admit(method, built.sends, form_of(built, method), exchanges=frozenset())
        except PolicyRefusedError as error:
            refused.append(error.rule)
        assert refused == ([] if count else ["example_count"])
