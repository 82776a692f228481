"""Every method of protofed passes the suite. A new one joins by being registered; nothing here names one."""

from __future__ import annotations

import pytest
from tests.support.method_facts import long

from protofed.client.method import client_methods
from protofed.common.config.recipe import Recipe
from protofed.deploy import shipped
from protofed.server.method import server_methods
from protofed.testing.conformance import MethodConformance

METHODS = sorted(client_methods)


def test_both_halves_are_registered_under_the_same_names() -> None:
    assert sorted(server_methods) == METHODS


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_a_title_of_its_own(name: str) -> None:
    titles = [server_methods.about(other).title for other in METHODS]
    assert server_methods.about(name).title != name
    assert titles.count(server_methods.about(name).title) == 1


@pytest.mark.parametrize("name", METHODS)
def test_the_server_knows_without_the_client_half_whether_it_sends_anything(name: str) -> None:
    half, about = client_methods.build(name, {}), server_methods.about(name)
    assert about.sends_nothing == (not half.sends)


class TestMethods(MethodConformance):
    @pytest.fixture(params=METHODS)
    def method(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def recipe(self, method: str) -> Recipe:
        return shipped.recipe(f"digits-{method}")

    @pytest.mark.parametrize("method", long(METHODS))
    def test_it_learns(self, method: str, recipe: Recipe) -> None:
        super().test_it_learns(method, recipe)
