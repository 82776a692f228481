"""A site takes part in a run that moves models between single sites only where its policy allows each way of it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.method_facts import METHODS, brief
from tests.support.round_contexts import round_context
from tests.support.scripted_server import RULES, RUN, AgentHarness, first_model, work

from protofed.client.method import client_methods
from protofed.common.errors import FailureReason
from protofed.common.payload import NOT_ON_THE_WIRE, Exchange, Part
from protofed.server.method import sent, server_methods

BOTH = frozenset(Exchange)
# By hand, from what the papers send to whom: a half that forgot to say so would pass every policy.
EXCHANGES = {
    "fedamp": BOTH,
    "fedfomo": BOTH,
    "apple": BOTH,
    "cfl": BOTH,
    "ifca": BOTH,
    "fedic": frozenset({Exchange.SHARE}),
}
NEEDED = [(method, way) for method, ways in EXCHANGES.items() for way in sorted(ways)]


def site_of(method: str, allowed: frozenset[Exchange]) -> AgentHarness:
    """One whose policy stands in no other way of the method."""
    lax: dict[str, Any] = {
        "methods": [method],
        "parts": sorted(frozenset(Part) - NOT_ON_THE_WIRE),
        "exchange": sorted(allowed),
        "example_count": True,
    }
    return AgentHarness(rules={**RULES, **lax}, recipe={**RUN, "method": {"name": method, **brief(method)}})


def test_what_each_method_moves_between_single_sites() -> None:
    moving = {name: ways for name in METHODS if (ways := client_methods.build(name, {}).declares.exchanges)}
    assert moving == EXCHANGES


@pytest.mark.parametrize(("method", "way"), NEEDED)
def test_a_fit_is_declined_unless_the_policy_allows_it(method: str, way: Exchange) -> None:
    site = site_of(method, BOTH - {way})
    task = site.fit(1)
    work(site.agent(), 1)
    assert site.declined() == [(task.task_id, FailureReason.POLICY)]
    assert site.link.calls["fetch"] == site.link.calls["push"] == 0


@pytest.mark.parametrize("method", EXCHANGES)
def test_with_what_it_needs_in_the_policy_it_trains(method: str) -> None:
    server, site = server_methods.build(method, {}), site_of(method, EXCHANGES[method])
    state = server.init(first_model(), round_context(3, round=0))
    site.fit(1, sent(server, state, "ann"))
    work(site.agent(), 1)
    assert site.declined() == []
    assert len(site.link.pushed) == 1
