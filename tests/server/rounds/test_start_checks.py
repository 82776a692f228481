"""What a recipe asks for and the server cannot give."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tests.server.conftest import recipe

from protofed.client.models.catalogue import architectures
from protofed.common import plugins
from protofed.common.config.models import MODELS
from protofed.common.errors import ConfigError
from protofed.server.rounds.start_checks import check_model, unmet


def test_the_server_knows_the_names_of_all_models_and_no_others() -> None:
    assert list(MODELS) == sorted(architectures)


def test_it_knows_them_without_torch() -> None:
    code = "import protofed.server.rounds.start_checks, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", [*MODELS, "hospital.models:build"])
def test_a_model_of_the_catalogue_or_of_the_sites_own_is_let_through(name: str) -> None:
    check_model(recipe(model={"name": name}))


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown model 'resnet81': did you mean 'resnet18'\?"):
        check_model(recipe(model={"name": "resnet81"}))


def test_of_a_model_like_none_all_names_are_told_in_a_sentence_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"expected one of: .*, simple-cnn\. A model of the sites' own"):
        check_model(recipe(model={"name": "zzz"}))


def test_a_plug_in_that_the_servers_settings_list_need_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_allowed", {"our-cnn"})
    check_model(recipe(model={"name": "our-cnn"}))


@pytest.mark.parametrize(
    ("federation", "count"),
    [
        ({"min_sites": 2, "quorum": 2}, 0),
        ({"min_sites": 2, "quorum": 3}, 1),
        ({"min_sites": 3, "quorum": 2}, 1),
        ({"min_sites": 2, "quorum": 1.0}, 0),
        ({"min_sites": 2, "quorum": 2, "required_sites": ["north"]}, 0),
        ({"min_sites": 2, "quorum": 2, "required_sites": ["norht"]}, 1),
        ({"min_sites": 2, "quorum": 5, "required_sites": ["norht", "x"]}, 3),
    ],
)
def test_what_is_unmet_is_listed(federation: dict[str, Any], count: int) -> None:
    assert len(unmet(recipe(federation=federation), frozenset({"north", "south"}))) == count


def test_it_says_what_is_needed_who_there_is_and_the_nearest_name() -> None:
    asked = recipe(federation={"min_sites": 2, "quorum": 3, "required_sites": ["norht"]})
    trainers, required = unmet(asked, frozenset({"north", "south"}))
    assert trainers.startswith("3 trainers are needed (min_sites = 2, quorum = 3), and 2 may take part: north, south;")
    assert required.startswith("required_sites names 'norht'")
    assert required.endswith("did you mean 'north'?")


def test_one_site_is_too_few_for_a_first_model_of_two() -> None:
    assert len(unmet(recipe(federation={"min_sites": 2, "quorum": 1}), frozenset({"north"}))) == 1
    assert unmet(recipe(federation={"min_sites": 1, "quorum": 1}), frozenset({"north"})) == []


def test_groups_of_earlier_runs_that_are_too_small_or_not_whole_are_named_with_what_dissolves_them() -> None:
    asked = {"secure": True, "sum_group": 3, "min_sites": 3, "quorum": 3}
    sites, groups = frozenset("abcd"), (("a", "b", "c"),)
    assert unmet(recipe(federation=asked), sites, groups) == []
    (small,) = unmet(recipe(federation={**asked, "sum_group": 4, "min_sites": 4, "quorum": 4}), sites, groups)
    assert small.startswith("the group a, b, c has 3 sites, and the run's have 4 or more: ")
    assert "`protofed sites regroup a`" in small
    (lacking,) = unmet(recipe(federation=asked), frozenset("abde"), groups)
    assert lacking.startswith("the group a, b, c is without c: ")
    assert "`protofed client consortium forget-group`" in lacking
    assert unmet(recipe(federation=asked), frozenset("abdef"), groups) == []
