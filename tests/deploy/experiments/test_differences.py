"""Differences to one of the recipes in tables, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.results import result_of

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.deploy.experiments.compare import CompareRequest, compare
from protofed.deploy.experiments.shown import as_json, grids, markdown, notes
from protofed.deploy.experiments.table import CompareOptions, Comparison

Recipes = Callable[..., Recipe]
AVG, NH = (0.5, 0.6, 0.4), (0.7, 0.7, 0.7)  # accuracies by seed


@pytest.fixture
def jobs(recipe_of: Recipes) -> list[tuple[Recipe, Any]]:
    results = [
        result_of(recipe_of(method), seed, accuracy)
        for method, accuracies in (("fedavg", AVG), ("fednh", NH), ("solo", (0.5,)))
        for seed, accuracy in enumerate(accuracies)
    ]
    return [(result.recipe, result) for result in results]


def differences(comparison: Comparison) -> dict[str, dict[str, str]]:
    found = next(grid for grid in grids(comparison) if grid.key == "differences")
    header, *rows = found.texts
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_each_recipe_stands_beside_the_first(jobs: list[tuple[Recipe, Any]]) -> None:
    rows = differences(Comparison.of(jobs))
    assert rows.keys() == {"small-fednh", "small-solo"}
    # Differences 0.2, 0.1, 0.3: mean 0.2, s = 0.1, t = 4.303; p = 2 / 8, the only row with a test.
    assert rows["small-fednh"]["GM"] == "+20.0 [-4.8, +44.8] p 0.25"
    assert (rows["small-fednh"]["pairs"], rows["small-solo"]["pairs"]) == ("3", "1")
    assert rows["small-solo"]["GM"] == "+0.0"
    assert "With 3 seeds no p" in markdown(Comparison.of(jobs))


def test_rows_of_fewer_seeds_are_not_said_to_have_more(recipe_of: Recipes, jobs: list[tuple[Recipe, Any]]) -> None:
    two = [result_of(recipe_of("fedper"), seed, 0.5) for seed in (0, 1)]
    text = markdown(Comparison.of([*jobs, *((result.recipe, result) for result in two)]))
    assert "With at most 3 seeds no p is below 0.25 (2 / 2^3), 0.5 after" in text


def test_any_recipe_may_be_the_reference(jobs: list[tuple[Recipe, Any]]) -> None:
    rows = differences(Comparison.of(jobs, CompareOptions(against="small-fednh")))
    assert rows["small-fedavg"]["GM"] == "-20.0 [-44.8, +4.8] p 0.25"
    assert rows["small-solo"]["GM"] == "-20.0"


def test_what_so_few_seeds_cannot_show_is_said_and_never_starred(jobs: list[tuple[Recipe, Any]]) -> None:
    text = markdown(Comparison.of(jobs[:6]))
    assert "With 3 seeds no p is below 0.25 (2 / 2^3)" in text
    assert "That takes 6 seeds or more" in text
    assert "*" not in text.replace("**", "")


def test_six_seeds_that_agree_are_starred(recipe_of: Recipes) -> None:
    results = [result_of(recipe_of("fedavg"), seed, 0.5 + 0.01 * seed) for seed in range(6)]
    results += [result_of(recipe_of("fednh"), seed, 0.6 + 0.012 * seed) for seed in range(6)]
    comparison = Comparison.of([(result.recipe, result) for result in results])
    assert differences(comparison)["small-fednh"]["GM"].endswith("p 0.031*")
    read = json.loads(as_json(comparison))["differences"]
    of = read["columns"]["GM"]["small-fednh"]
    assert (of["p"], of["corrected"], of["smallest_p"], of["significant"]) == (2 / 64, 2 / 64, 2 / 64, True)
    assert read["against"] == "small-fedavg"


def test_one_recipe_or_no_result_has_no_differences(jobs: list[tuple[Recipe, Any]]) -> None:
    assert [grid.key for grid in grids(Comparison.of(jobs[:3]))] == ["scores"]
    nothing = Comparison.of([(recipe, None) for recipe, _ in jobs])
    assert [grid.key for grid in grids(nothing)] == ["scores"]
    assert json.loads(as_json(nothing))["differences"]["columns"] == {}


def test_of_one_seed_there_is_no_test(recipe_of: Recipes) -> None:
    results = [result_of(recipe_of(method), 0, score) for method, score in (("fedavg", 0.5), ("fednh", 0.25))]
    comparison = Comparison.of([(result.recipe, result) for result in results])
    assert differences(comparison)["small-fednh"]["GM"] == "-25.0"
    assert "One seed has neither" in markdown(comparison)


def test_columns_that_were_asked_for_are_the_ones_that_are_compared(jobs: list[tuple[Recipe, Any]]) -> None:
    comparison = Comparison.of(jobs, CompareOptions(["loss", "global.accuracy"]))
    assert list(differences(comparison)["small-fednh"]) == ["recipe", "pairs", "loss", "global.accuracy"]
    assert "Lower is better: loss." in markdown(comparison)


def test_a_reference_that_is_not_there_is_refused_before_a_job_runs(
    recipe_of: Recipes, tmp_path: Path, stand_in: Any
) -> None:
    with pytest.raises(ConfigError, match="did you mean 'small-fednh'"):
        compare([recipe_of("fedavg"), recipe_of("fednh")], CompareRequest(tmp_path / "out", against="small-fedhn"))
    assert stand_in.ran == []
    compare([recipe_of("fedavg"), recipe_of("fednh")], CompareRequest(tmp_path / "out", against="small-fednh"))
    compare([], CompareRequest(tmp_path / "out"))  # as it was computed
    assert json.loads((tmp_path / "out" / "table.json").read_text())["differences"]["against"] == "small-fednh"
    with pytest.raises(ConfigError, match="small-fedavg"):
        compare([], CompareRequest(tmp_path / "out", against="other"))


def test_results_of_other_code_are_named(jobs: list[tuple[Recipe, Any]]) -> None:
    comparison = Comparison.of(jobs, CompareOptions(other_code={"small-fedavg": [0, 2]}))
    assert any("small-fedavg, seeds 0, 2" in note for note in notes(comparison))
    assert json.loads(as_json(comparison))["other_code"] == {"small-fedavg": [0, 2]}
    assert not any("other code" in note for note in notes(Comparison.of(jobs)))
