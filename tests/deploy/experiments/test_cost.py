"""What runs cost, and what it takes to reach a score: columns and curves over bytes and epochs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.support.results import result_of

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import SiteId
from protofed.deploy.experiments.curves import AXES, ROUNDS, curves_of, over_axis
from protofed.deploy.experiments.experiment import Result, RoundTraffic
from protofed.deploy.experiments.shown import markdown
from protofed.deploy.experiments.summary import Cost, Target, costs
from protofed.deploy.experiments.table import CompareOptions, Comparison

Recipes = Callable[..., Recipe]
ONE, TWO = SiteId("site-1"), SiteId("site-2")


def costly(recipe: Recipe, seed: int, *accuracies: float, up: int = 1, epochs: int = 2) -> Result:
    """`up` and 2 MB a round; site 1 trains `epochs` epochs of its 5 images in a round, site 2 one epoch more."""
    rounds = range(1, len(accuracies) + 1)
    changes = {
        "traffic": {number: RoundTraffic(up=up * 10**6, down=2 * 10**6) for number in rounds},
        "trained": {number: {ONE: 5 * epochs, TWO: 5 * (epochs + 1)} for number in rounds},
    }
    return result_of(recipe, seed, *accuracies).model_copy(update=changes)


def cells(comparison: Comparison) -> list[dict[str, str]]:
    table = markdown(comparison).partition("\n\n")[0].splitlines()
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return [dict(zip(split[0], row, strict=True)) for row in split[2:]]


def test_costs_add_up_round_by_round(recipe_of: Recipes) -> None:
    result = costly(recipe_of("fedavg"), 0, 0.1, 0.2, 0.3)
    assert costs(result) == {1: Cost(3 * 10**6, 2.5), 2: Cost(6 * 10**6, 5.0), 3: Cost(9 * 10**6, 7.5)}
    assert costs(result_of(recipe_of("fedavg"), 0, 0.1)) == {}


def test_of_a_rounds_sites_the_mean_counts(recipe_of: Recipes) -> None:
    result = costly(recipe_of("fedavg"), 0, 0.1, 0.2).model_copy(update={"trained": {1: {ONE: 20}, 2: {TWO: 5}}})
    assert [cost.epochs for cost in costs(result).values()] == [4.0, 5.0]


def test_a_table_has_what_the_runs_cost_and_what_a_score_took(recipe_of: Recipes) -> None:
    avg, rep = recipe_of("fedavg"), recipe_of("fedrep")
    results = [costly(avg, 0, 0.2, 0.5, 0.9), costly(avg, 1, 0.2, 0.4, 0.5), costly(rep, 0, 0.6, 0.7, 0.8, epochs=10)]
    results.append(costly(rep, 1, 0.1, 0.1, 0.1, epochs=10))
    options = CompareOptions(target=Target("global.accuracy", 0.5))
    of_avg, of_rep = cells(Comparison.of([(one.recipe, one) for one in results], options))
    assert (of_avg["MB"], of_avg["epochs"]) == ("9.0", "7.5")
    assert (of_rep["MB"], of_rep["epochs"]) == ("9.0", "31.5")
    assert of_avg["rounds to 50 %"] == "2 ± 1"  # of 2 and 3
    assert of_avg["MB to 50 %"] == "7.5 ± 2.1"
    assert of_rep["rounds to 50 %"] == "1 (1 of 2)"
    assert of_rep["epochs to 50 %"] == "10.5 (1 of 2)"
    never = CompareOptions(target=Target("global.accuracy", 0.95))
    assert cells(Comparison.of([(results[0].recipe, results[0])], never))[0]["MB to 95 %"] == "–"


def test_a_run_without_records_of_its_cost_has_none(recipe_of: Recipes) -> None:
    result = result_of(recipe_of("fedavg"), 0, 0.2)
    (row,) = cells(Comparison.of([(result.recipe, result)]))
    assert not {"MB", "epochs"} & row.keys()


@pytest.mark.parametrize(
    ("text", "means", "round"),
    [
        ("global.accuracy=0.5", {1: 0.4, 5: 0.5, 9: 0.6}, 5),
        ("loss=0.5", {1: 0.9, 2: 0.4, 3: 0.6}, 2),
        ("x=.5", {1: 0.4}, None),
    ],
)
def test_a_target_is_reached_in_the_first_round_that_is_as_good(
    text: str, means: dict[int, float], round: int | None
) -> None:
    assert Target.read(text).reached(means) == round


@pytest.mark.parametrize("text", ["global.accuracy", "global.accuracy=", "global.accuracy=80%", "=x"])
def test_a_target_is_a_score_and_a_number(text: str) -> None:
    with pytest.raises(ConfigError, match=r"global\.accuracy=0\.8"):
        Target.read(text)


def test_curves_over_a_cost_are_drawn_where_recipes_differ_in_it(recipe_of: Recipes) -> None:
    avg, rep = recipe_of("fedavg"), recipe_of("fedrep")

    def drawn(up: int, epochs: int) -> set[tuple[str, str]]:
        other = costly(rep, 0, 0.1, 0.2, up=up, epochs=epochs)
        curves = curves_of({"avg": [costly(avg, 0, 0.1, 0.2)], "rep": [other]})
        return {(one.score, one.axis.key) for one in curves if one.axis is not ROUNDS}

    scores = ("global.accuracy", "personal.pm_v", "personal.local.accuracy")
    assert drawn(1, 2) == set()
    assert drawn(4, 2) == {(score, "bytes") for score in scores}
    assert drawn(1, 10) == {(score, "epochs") for score in scores}


def test_a_curve_over_a_cost_has_the_seeds_mean_of_it(recipe_of: Recipes) -> None:
    recipe = recipe_of("fedavg")
    results = [costly(recipe, 0, 0.1, 0.2), costly(recipe, 1, 0.3, 0.4, up=3)]
    found = over_axis(results, "global.accuracy", AXES[1])
    assert found is not None
    assert found[0] == [4.0, 8.0]  # of 3 and 6 MB, and of 5 and 10 MB
    np.testing.assert_array_equal(found[1], [[0.1, 0.2], [0.3, 0.4]])
    assert over_axis([results[0], result_of(recipe, 1, 0.1, 0.2)], "global.accuracy", AXES[1]) is None


def test_worst_sites_and_classes_stand_beside_the_means(recipe_of: Recipes) -> None:
    result = result_of(recipe_of("fedavg"), 0, 0.4)
    for site, accuracy in ((ONE, 0.9), (TWO, 0.3)):
        recalls = {"personal.local.recall.0": accuracy, "personal.local.recall.1": 0.25}
        result.scores[1][site] |= {"global.local.accuracy": accuracy, **recalls}
    (row,) = cells(Comparison.of([(result.recipe, result)]))
    assert (row["GM"], row["worst class"]) == ("40.0", "10.0")
    assert (row["PM(V)"], row["worst site"]) == ("60.0", "50.0")
    assert (row["GM local"], row["GM worst site"]) == ("75.0", "30.0")  # (3 × 0.9 + 0.3) / 4
    assert (row["local"], row["local worst"], row["local worst class"]) == ("80.0", "20.0", "25.0")
