"""The page of a comparison: it needs nothing but itself, tells no machine's name, and says what the results say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from tests.support.results import result_of

from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.deploy.cli import compare as cli
from protofed.deploy.experiments.code_digest import CodeDigest
from protofed.deploy.experiments.curves import collect_curves
from protofed.deploy.experiments.experiment import Result, RoundTraffic
from protofed.deploy.experiments.job import machine_class
from protofed.deploy.experiments.summary import USUAL
from protofed.deploy.experiments.table import CompareOptions, Comparison
from protofed.deploy.experiments.tuning import Trial, TunedRecipe
from protofed.deploy.report.comparison import page, without_folder

Recipes = Callable[..., Recipe]
COMMAND = "protofed compare small-fedavg small-fednh --seeds 0,1"
CODE = CodeDigest(modules={"protofed.common.codec": "ab"}, libraries={"python": "3.11", "torch": "9.9.9"})


def computed(recipe: Recipe, seed: int, *accuracies: float) -> Result:
    rounds = range(1, len(accuracies) + 1)
    changes = {
        "state": Digest(f"{seed:x}{recipe.plan.lr:.3f}".replace(".", "").ljust(64, "c")),
        "code": CODE,
        "machine": "Linux x86_64, Some CPU, 2 cores; device cpu",
        "traffic": {number: RoundTraffic(up=10**6, down=10**6) for number in rounds},
        "trained": {number: {"site-1": 5, "site-2": 5} for number in rounds},
    }
    return result_of(recipe, seed, *accuracies).model_copy(update=changes)


@pytest.fixture
def results(recipe_of: Recipes) -> list[Result]:
    nh = recipe_of("fednh", plan={**recipe_of("fednh").plan.model_dump(), "lr": 0.125})
    return [
        *(computed(recipe_of("fedavg"), seed, 0.2, 0.4 + 0.1 * seed) for seed in (0, 1)),
        *(computed(nh, seed, 0.3, 0.6) for seed in (0, 1)),
    ]


def told(results: list[Result], options: CompareOptions | None = None, command: str = COMMAND) -> dict[str, str]:
    """The sections' texts, by their keys, of a page that is checked as a whole; `all` is everything."""
    comparison = Comparison.of([(result.recipe, result) for result in results], options)
    curves = [one for one in collect_curves(comparison.results) if one.score in ("global.accuracy", "personal.pm_v")]
    html = page(comparison, curves, command)
    root = ElementTree.fromstring(html)  # noqa: S314  (our own)
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    assert not re.search(r"<script|@import|<iframe|<img|url\((?!#)|\ssrc=|http", html)
    for target in re.findall(r'(?<=href=")[^"]+', html):
        assert target.startswith(("#", "data:"))
    sections = {s.attrib["id"]: " ".join(" ".join(s.itertext()).split()) for s in root.iter("section")}
    return {**sections, "all": html}


def test_the_page_has_tables_curves_settings_and_provenance(results: list[Result]) -> None:
    said = told(results)
    assert told(results) == said
    assert list(said) == ["scores", "curves", "settings", "provenance", "all"]
    for cell in ("45.0 ± 7.1", "60.0 ± 0.0", "+15.0 [-48.5, +78.5] p 0.50"):
        assert cell in said["scores"]
    assert "FedNH (Dai et al., AAAI 2023)" in said["scores"]
    assert "small-fedavg 45.0 % at 2; small-fednh 60.0 % at 2" in said["curves"]
    assert COMMAND in said["provenance"]
    assert "torch 9.9.9" in said["provenance"]
    assert "Some CPU" in said["provenance"]
    assert CODE.whole in said["provenance"]
    assert all(result.state in said["provenance"] for result in results)


def test_what_differs_stands_first_and_sentences_follow_the_results(results: list[Result], recipe_of: Recipes) -> None:
    settings = told(results)["settings"]
    differing, _, common = settings.partition("What all have in common")
    for value in ("method.name fedavg fednh", "plan.lr 0.05 0.125", "method.scale – 1.0"):
        assert value in differing
    assert "plan.momentum" not in differing
    assert "plan.momentum" in common
    assert "data.seed" not in settings
    comparison = Comparison.of([(recipe_of("fednh"), None)])
    html = page(comparison, collect_curves(comparison.results), COMMAND)
    assert "0 finished runs of 0 recipes" in html
    assert "Not all seeds have ended of small-fednh." in html
    said = told(results)
    assert "No curves over bytes or epochs" in said["curves"]
    dearer = results[2].model_copy(update={"trained": {n: {"site-1": 50, "site-2": 50} for n in (1, 2)}})
    changed = told([*results[:2], dearer, results[3]])
    assert "No curves over bytes or epochs" not in changed["curves"]
    assert "over epochs" in changed["curves"]
    assert "Rounds shortened to 2" in told(results, CompareOptions(shortened=2))["scores"]
    assert "Computed by other code" in told(results, CompareOptions(other_code={"small-fedavg": [0]}))["all"]
    assert told(results, command="")["provenance"].count("command –") == 1


def test_a_search_is_told_with_its_budget_and_its_score(results: list[Result]) -> None:
    trials = [Trial({"plan.lr": rate}, {0: score, 1: score}) for rate, score in ((0.01, 0.3), (0.1, 0.5), (0.4, 0.4))]
    tuned = [TunedRecipe(name, USUAL[0], trials, 0.25) for name in ("small-fedavg", "small-fednh")]
    said = told(results, CompareOptions(tuned=tuned))
    for phrase in ("3 settings × 2 seeds = 6 runs", "25 %", "No run of the search saw the test set", "50.0", "plan.lr"):
        assert phrase in said["tuning"]
    assert "first or last" not in said["tuning"]
    edge = [TunedRecipe("small-fedavg", USUAL[0], [*trials[:2], Trial({"plan.lr": 0.4}, {0: 0.9, 1: 0.9})], 0.25)]
    assert (
        "first or last that was tried: small-fedavg (plan.lr)"
        in told(results[:2], CompareOptions(tuned=edge))["tuning"]
    )


def test_no_path_and_no_name_of_the_machine_is_told(
    results: list[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("platform.node", "socket.gethostname", "getpass.getuser"):
        monkeypatch.setattr(name, lambda: "of-the-machine")
    monkeypatch.setenv("HOME", str(tmp_path))

    def moved(result: Result) -> Result:
        data = {**result.recipe.model_dump(mode="json")["data"], "source": "npz", "root": str(tmp_path / "lesions.npz")}
        recipe = Recipe.model_validate({**result.recipe.model_dump(mode="json"), "data": data})
        return result.model_copy(update={"recipe": recipe})

    said = told([moved(result) for result in results])
    assert "…/lesions.npz" in said["settings"]
    assert str(tmp_path) not in said["all"]
    assert "of-the-machine" not in said["all"] + machine_class(torch.device("cpu"))


@pytest.mark.parametrize(
    ("recipes", "options", "line"),
    [
        (["digits-fedavg", "/home/me/mine.toml"], {"seeds": "0,1"}, "digits-fedavg mine.toml --seeds 0,1"),
        (
            ["a"],
            {"set": ['data.root="/data/x.npz"', "plan.lr=0.1"]},
            "a --set 'data.root=\"…/x.npz\"' --set plan.lr=0.1",
        ),
        (["a"], {"tune": ["plan.lr=0.1,1"], "vary": None}, "a --tune plan.lr=0.1,1"),
    ],
)
def test_the_command_names_no_folder(recipes: list[str], options: dict[str, Any], line: str) -> None:
    assert cli.command_line(recipes, options) == f"protofed compare {line}"


def test_only_what_may_be_a_path_is_cut() -> None:
    assert without_folder("data.group_pattern", "/(P[0-9]+)_") == "/(P[0-9]+)_"
    assert without_folder("data.options.folder", "/a/b/") == "…/b"
