"""Paired differences, their interval and their test, by hand and against all signs counted one by one.

Differences to one of the recipes in tables, for people and for programs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.results import result_of

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.deploy.experiments.compare import CompareRequest, compare
from protofed.deploy.experiments.shown import as_json, grids, markdown, notes
from protofed.deploy.experiments.table import (
    CompareOptions,
    Comparison,
    PairedDifference,
    can_show,
    corrected,
    paired,
    seeds_needed,
    smallest_p,
)


def difference(*values: float) -> PairedDifference:
    found = paired(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    assert found is not None
    return found


def test_pairs_are_the_seeds_of_both_with_students_interval() -> None:
    found = paired({0: 0.5, 1: 0.6, 7: 0.9}, {7: 0.4, 0: 0.4, 3: 0.1})
    assert found is not None
    assert found.seeds == (0, 7)
    assert found.mean == pytest.approx((0.1 + 0.5) / 2)
    assert paired({0: 0.5}, {1: 0.5}) is None
    found = difference(0.1, 0.2, 0.3)
    half = 4.302653 * 0.1 / 3**0.5  # t of 97.5 % with 2 degrees of freedom; s = 0.1
    assert found.low == pytest.approx(0.2 - half, abs=1e-6)
    assert found.high == pytest.approx(0.2 + half, abs=1e-6)
    assert difference(0.3) == PairedDifference((0,), 0.3)
    assert not difference(0.3).significant


@pytest.mark.parametrize(
    ("values", "p"),
    [
        ((0.1, 0.2, 0.3), 2 / 8),
        ((-0.1, -0.2, -0.3), 2 / 8),
        ((0.1, 0.2, -0.3), 1.0),
        ((0.0, 0.0, 0.0), 1.0),
        ((0.1, 0.0, 0.1), 0.5),
        ((0.1,) * 6, 2 / 64),
    ],
)
def test_p_of_few_seeds(values: tuple[float, ...], p: float) -> None:
    assert difference(*values).p == pytest.approx(p)


@pytest.mark.parametrize(
    ("counts", "p"), [((-3, -1, 4, -1), 1.0), ((-3, 4, -4, 3, 3, 4), 38 / 64), ((5, 1, 3, -1, -2, 1, -3), 90 / 128)]
)
@pytest.mark.parametrize("right", [0, 128, 266])  # of 520 images, by the reference
def test_signs_of_equal_means_tie_whatever_their_last_bits(counts: tuple[int, ...], p: float, right: int) -> None:
    """Counted by hand in whole images, whose sums are exact."""
    found = paired({seed: (right + n) / 520 for seed, n in enumerate(counts)}, dict.fromkeys(range(9), right / 520))
    assert found is not None
    assert found.p == p


def test_p_is_the_share_of_all_signs_that_give_as_much_or_of_many_drawn_alike() -> None:
    drawn = np.random.default_rng(5)
    for _ in range(5):
        values = drawn.normal(0.6, 1, 7)
        means = [abs(np.mean(np.array(signs) * values)) for signs in product((1, -1), repeat=7)]
        expected = np.mean([mean >= abs(values.mean()) - 1e-12 for mean in means])
        assert difference(*values).p == pytest.approx(expected)
    values = np.random.default_rng(5).normal(0.3, 1, 20)
    assert difference(*values).p == difference(*values).p
    assert 0 < (difference(*values + 5).p or 0) < 1e-3


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_no_difference_of_few_seeds_is_ever_significant(seeds: int) -> None:
    found = corrected({"huge": difference(*(1.0 + 0.001 * seed for seed in range(seeds)))})["huge"]
    assert found.p == smallest_p(seeds) == 2 / 2**seeds
    assert not found.significant
    assert "no difference can be significant" in can_show({seeds}, 1)


def test_six_seeds_are_enough_for_one_row_and_more_rows_are_corrected() -> None:
    agreed = difference(*(0.1 + 0.01 * seed for seed in range(6)))
    assert corrected({"a": agreed})["a"].significant
    assert not any(of.significant for of in corrected({"a": agreed, "b": agreed}).values())
    assert (seeds_needed(1), seeds_needed(2), seeds_needed(20)) == (6, 7, 10)
    assert "no difference" not in can_show([6], 1)
    assert "no difference" in can_show([6], 2)
    raw = {"a": 0.04, "b": 0.01, "c": 0.03, "d": 0.9}
    found = corrected({name: PairedDifference((0, 1), 0.0, 0.0, 0.0, p) for name, p in raw.items()})
    # b: 4 × 0.01; c: 3 × 0.03; a: 2 × 0.04 = 0.08, and c's 0.09 is no smaller; d: 0.9
    assert {name: of.corrected for name, of in found.items()} == pytest.approx(
        {"a": 0.09, "b": 0.04, "c": 0.09, "d": 0.9}
    )
    alone = corrected({"a": difference(0.3), "b": difference(0.1, 0.2)})
    assert (alone["a"].corrected, alone["b"].corrected) == (None, 0.5)  # one row is tested


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


def test_each_recipe_stands_beside_the_first_or_any_other(jobs: list[tuple[Recipe, Any]]) -> None:
    rows = differences(Comparison.of(jobs))
    assert rows.keys() == {"small-fednh", "small-solo"}
    # Differences 0.2, 0.1, 0.3: mean 0.2, s = 0.1, t = 4.303; p = 2 / 8, the only row with a test.
    assert rows["small-fednh"]["GM"] == "+20.0 [-4.8, +44.8] p 0.25"
    assert (rows["small-fednh"]["pairs"], rows["small-solo"]["pairs"]) == ("3", "1")
    assert rows["small-solo"]["GM"] == "+0.0"
    assert "With 3 seeds no p" in markdown(Comparison.of(jobs))
    rows = differences(Comparison.of(jobs, CompareOptions(against="small-fednh")))
    assert rows["small-fedavg"]["GM"] == "-20.0 [-44.8, +4.8] p 0.25"
    assert rows["small-solo"]["GM"] == "-20.0"


def test_what_few_seeds_cannot_show_is_said_and_never_starred(
    jobs: list[tuple[Recipe, Any]], recipe_of: Recipes
) -> None:
    text = markdown(Comparison.of(jobs[:6]))
    assert "With 3 seeds no p is below 0.25 (2 / 2^3)" in text
    assert "That takes 6 seeds or more" in text
    assert "*" not in text.replace("**", "")
    two = [result_of(recipe_of("fedper"), seed, 0.5) for seed in (0, 1)]
    text = markdown(Comparison.of([*jobs, *((result.recipe, result) for result in two)]))
    assert "With at most 3 seeds no p is below 0.25 (2 / 2^3), 0.5 after" in text


def test_six_seeds_that_agree_are_starred(recipe_of: Recipes) -> None:
    results = [result_of(recipe_of("fedavg"), seed, 0.5 + 0.01 * seed) for seed in range(6)]
    results += [result_of(recipe_of("fednh"), seed, 0.6 + 0.012 * seed) for seed in range(6)]
    comparison = Comparison.of([(result.recipe, result) for result in results])
    assert differences(comparison)["small-fednh"]["GM"].endswith("p 0.031*")
    read = json.loads(as_json(comparison))["differences"]
    of = read["columns"]["GM"]["small-fednh"]
    assert (of["p"], of["corrected"], of["smallest_p"], of["significant"]) == (2 / 64, 2 / 64, 2 / 64, True)
    assert read["against"] == "small-fedavg"


def test_without_pairs_there_are_no_differences_and_of_one_seed_no_test(
    jobs: list[tuple[Recipe, Any]], recipe_of: Recipes
) -> None:
    assert [grid.key for grid in grids(Comparison.of(jobs[:3]))] == ["scores"]
    nothing = Comparison.of([(recipe, None) for recipe, _ in jobs])
    assert [grid.key for grid in grids(nothing)] == ["scores"]
    assert json.loads(as_json(nothing))["differences"]["columns"] == {}
    results = [result_of(recipe_of(method), 0, score) for method, score in (("fedavg", 0.5), ("fednh", 0.25))]
    comparison = Comparison.of([(result.recipe, result) for result in results])
    assert differences(comparison)["small-fednh"]["GM"] == "-25.0"
    assert "One seed has neither" in markdown(comparison)


def test_columns_asked_for_are_compared_and_results_of_other_code_named(jobs: list[tuple[Recipe, Any]]) -> None:
    comparison = Comparison.of(jobs, CompareOptions(["loss", "global.accuracy"]))
    assert list(differences(comparison)["small-fednh"]) == ["recipe", "pairs", "loss", "global.accuracy"]
    assert "Lower is better: loss." in markdown(comparison)
    comparison = Comparison.of(jobs, CompareOptions(other_code={"small-fedavg": [0, 2]}))
    assert any("small-fedavg, seeds 0, 2" in note for note in notes(comparison))
    assert json.loads(as_json(comparison))["other_code"] == {"small-fedavg": [0, 2]}
    assert not any("other code" in note for note in notes(Comparison.of(jobs)))


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
