"""A run's scores over rounds and sites, by hand and against reference numbers.

What runs cost, and what it takes to reach a score: columns and curves over bytes and epochs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.results import result_of

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, DataError
from protofed.common.payload import SiteId
from protofed.common.protocol.scores import spread, spreads
from protofed.deploy.experiments.curves import AXES, ROUNDS, collect_curves, over_axis
from protofed.deploy.experiments.experiment import Result, RoundTraffic
from protofed.deploy.experiments.shown import markdown
from protofed.deploy.experiments.summary import OWN_LOCAL as LOCAL
from protofed.deploy.experiments.summary import (
    Cost,
    Summary,
    Target,
    costs,
    local_accuracies,
    over_sites,
    recent,
    summarise,
    worst_classes,
)
from protofed.deploy.experiments.table import CompareOptions, Comparison

GOLDEN = Path(__file__).parents[2] / "golden" / "metrics_numpy.npz"
SITES = ("ann", "bob", "cyd", "dan")


def rounds_of(accuracies: list[list[float]], name: str = LOCAL) -> dict[int, dict[str, dict[str, float]]]:
    """Rounds 1, 2, ... of one score of `SITES`."""
    return {
        number: {site: {name: value} for site, value in zip(SITES, values, strict=False)}
        for number, values in enumerate(accuracies, 1)
    }


def summary(scores: Any, cohorts: Any, tested: Any) -> Summary:
    """Of a result with nothing else in it."""
    known: dict[str, Any] = {"scores": scores, "cohorts": cohorts, "local_test_examples": tested, "train_examples": {}}
    return summarise(Result.model_construct(**known))


def test_a_runs_scores_are_the_reference_numbers() -> None:
    golden = np.load(GOLDEN)
    tested = dict(zip(SITES, golden["best_mean_n_test"].tolist(), strict=True))
    found = summary(rounds_of(golden["best_mean_round_acc"].tolist()), {}, tested)
    assert [found.local[r] for r in (1, 2, 3)] == pytest.approx(golden["best_mean_weighted"].tolist())
    assert max(found.local.values()) == found.local[2]
    assert found.local[2] == pytest.approx(float(golden["best_mean_accuracy"]))
    assert found.round == 3
    assert found.local[3] == pytest.approx(0.522)
    both = rounds_of([golden["PML_per_client"].tolist()], "personal.pm_l")
    for site, value in zip(SITES, golden["PMV_per_client"].tolist(), strict=True):
        both[1][site]["personal.pm_v"] = value
    found = summary(both, {1: SITES}, {})
    assert found.sites["personal.pm_l"].std == pytest.approx(float(golden["fairness_std_PML_population"]))
    assert found.sites["personal.pm_l"].mean == pytest.approx(float(golden["PML"]))
    assert found.sites["personal.pm_v"].mean == pytest.approx(float(golden["PMV"]))
    assert found.sites["personal.pm_v"].worst == float(golden["PMV_per_client"].min())
    assert found.active == found.sites


def test_active_sites_are_the_last_cohorts_and_a_round_is_pooled_over_its_sites() -> None:
    scores = rounds_of([[0.9, 0.9, 0.9, 0.9], [0.2, 0.4, 0.6, 0.8]])
    scores[2]["eva"] = {"global.accuracy": 0.7}
    found = summary(scores, {1: ("cyd", "dan"), 2: ("ann", "bob", "zoe")}, {})
    assert found.sites[LOCAL] == spread([0.2, 0.4, 0.6, 0.8])
    assert found.active == {LOCAL: spread([0.2, 0.4])}
    assert found.sites["global.accuracy"].mean == 0.7
    assert found.local == {}
    scores = {7: {"ann": {LOCAL: 1.0}, "bob": {"x": 1.0}, "cyd": {LOCAL: 0.25}}, 5: {"ann": {"x": 0.0}}}
    assert local_accuracies(scores, {"ann": 1, "bob": 50, "cyd": 2}, LOCAL) == {7: 0.5}
    scores = {1: {"ann": {LOCAL: 1.0, "global.local.accuracy": 0.5}, "bob": {"global.local.accuracy": 0.0}}}
    found = summary(scores, {}, {"ann": 3, "bob": 1})
    assert found.local == {1: 1.0}
    assert found.shared_local == {1: 0.375}
    found = summary({}, {}, {"ann": 3})
    assert (found.round, found.sites, found.active, found.recent, found.local) == (0, {}, {}, {}, {})
    assert (found.worst_class, found.shared_local) == ({}, {})


@pytest.mark.parametrize("tested", [{"bob": 3}, {"ann": 0, "bob": 3}])
def test_a_site_without_its_size_is_refused(tested: dict[str, int]) -> None:
    with pytest.raises(DataError, match="expected the number of its test examples"):
        summary(rounds_of([[0.1, 0.2]]), {}, tested)


def test_recent_and_worst_class_are_over_rounds_and_sites() -> None:
    scores = rounds_of([[float(number), number + 2.0] for number in range(1, 13)])  # means 2 to 13
    scores[12]["eva"] = {"global.accuracy": 0.5}
    scores[20] = {"eva": {"global.accuracy": 0.25}}
    found = recent(over_sites(dict(reversed(scores.items())), {}))
    assert found == {LOCAL: pytest.approx(sum(range(4, 14)) / 10), "global.accuracy": 0.375}
    assert recent(over_sites(scores, {}), rounds=1) == {LOCAL: 13.0, "global.accuracy": 0.25}
    by_site = {
        "ann": {"personal.recall.2": 0.5, "personal.recall.10": 0.0, "personal.local.recall.1": 0.75},
        "bob": {"personal.recall.2": 0.25, "personal.recall.10": 1.0, "personal.accuracy": 0.0},
        "eva": {"global.recall.10": 0.5, "global.recall.9": 0.5},
    }
    found = worst_classes(spreads(by_site))
    assert found == {"personal": 0.375, "personal.local": 0.75, "global": 0.5}


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


def test_costs_add_up_round_by_round_by_the_sites_mean(recipe_of: Recipes) -> None:
    result = costly(recipe_of("fedavg"), 0, 0.1, 0.2, 0.3)
    assert costs(result) == {1: Cost(3 * 10**6, 2.5), 2: Cost(6 * 10**6, 5.0), 3: Cost(9 * 10**6, 7.5)}
    assert costs(result_of(recipe_of("fedavg"), 0, 0.1)) == {}
    result = costly(recipe_of("fedavg"), 0, 0.1, 0.2).model_copy(update={"trained": {1: {ONE: 20}, 2: {TWO: 5}}})
    assert [cost.epochs for cost in costs(result).values()] == [4.0, 5.0]
    result = result_of(recipe_of("fedavg"), 0, 0.2)
    (row,) = cells(Comparison.of([(result.recipe, result)]))
    assert not {"MB", "epochs"} & row.keys()


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


def test_curves_over_a_cost_are_drawn_where_recipes_differ_over_the_seeds_mean(recipe_of: Recipes) -> None:
    avg, rep = recipe_of("fedavg"), recipe_of("fedrep")

    def drawn(up: int, epochs: int) -> set[tuple[str, str]]:
        other = costly(rep, 0, 0.1, 0.2, up=up, epochs=epochs)
        curves = collect_curves({"avg": [costly(avg, 0, 0.1, 0.2)], "rep": [other]})
        return {(one.score, one.axis.key) for one in curves if one.axis is not ROUNDS}

    scores = ("global.accuracy", "personal.pm_v", "personal.local.accuracy")
    assert drawn(1, 2) == set()
    assert drawn(4, 2) == {(score, "bytes") for score in scores}
    assert drawn(1, 10) == {(score, "epochs") for score in scores}
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
