"""What each method declares, at a site: its policy allows each way in which models move between single sites, or not.

The global model is scored on a site's own test set where the method has one, and nowhere else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.method_facts import METHODS, brief
from tests.support.round_contexts import round_context
from tests.support.scripted_server import RULES, RUN, AgentHarness, first_model, site_data, work

from protofed.client.data.site_data import SiteData
from protofed.client.method import client_methods
from protofed.common.config.recipe import Recipe
from protofed.common.errors import FailureReason
from protofed.common.payload import NOT_ON_THE_WIRE, Exchange, Part
from protofed.server.method import sent, server_methods

BOTH = frozenset(Exchange)
# By hand, from what the papers send to whom: a half that forgot to say so would pass every policy.
EXCHANGES = {**dict.fromkeys(["fedamp", "fedfomo", "apple", "cfl", "ifca"], BOTH), "fedic": frozenset({Exchange.SHARE})}
NEEDED = [(method, way) for method, ways in EXCHANGES.items() for way in sorted(ways)]


OWN, GLOBAL = "personal.local.accuracy", "global.local.accuracy"
# By hand, where `personal` does not tell.
WITH, WITHOUT = {"ditto", "apfl", "fedphp"}, {"fedamp", "fedfomo", "apple", "cfl", "ifca"}


def with_local_test(recipe: Recipe) -> SiteData:
    return replace(site_data(), local_test=site_data().train)


def site_of(method: str, allowed: frozenset[Exchange] = BOTH) -> AgentHarness:
    """One whose policy stands in no other way of the method."""
    lax: dict[str, Any] = {
        "methods": [method],
        "parts": sorted(frozenset(Part) - NOT_ON_THE_WIRE),
        "exchange": sorted(allowed),
        "example_count": True,
        "class_distribution_estimate": True,
        "metrics": [OWN, GLOBAL],
    }
    recipe = {**RUN, "method": {"name": method, **brief(method)}}
    return AgentHarness(rules={**RULES, **lax}, recipe=recipe, load_data=with_local_test)


def test_what_each_method_moves_between_sites_and_whether_it_has_a_global_model() -> None:
    moving = {name: ways for name in METHODS if (ways := client_methods.build(name, {}).declares.exchanges)}
    assert moving == EXCHANGES
    having = {name for name in METHODS if server_methods.get(name).global_model}
    assert {name for name in METHODS if client_methods.build(name, {}).declares.global_model} == having
    assert having >= WITH
    assert not having & WITHOUT


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


@pytest.mark.usefixtures("few_images")
@pytest.mark.parametrize("method", METHODS)
def test_a_site_scores_the_global_model_if_there_is_one(method: str) -> None:
    server, site = server_methods.build(method, {}), site_of(method)
    base = sent(server, server.init(first_model(), round_context(3, round=0)), "ann")
    site.fit(1, base)
    site.score(1, base)
    work(site.agent(), 2)
    assert site.link.scores[0].keys() == {OWN, *([GLOBAL] if server.global_model else [])}
