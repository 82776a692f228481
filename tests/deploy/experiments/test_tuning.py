"""`compare --tune`: the same search for every recipe, on a validation part, and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, RunFailedError
from protofed.deploy.experiments.compare import CompareRequest, compare
from protofed.deploy.experiments.experiment import ExperimentJob, read_contents
from protofed.deploy.experiments.tuning import TunedRecipe, outcome, read_grid

Recipes = Callable[..., Recipe]
RATES = {"plan.lr": [0.01, 0.1, 0.4]}


def peak(best: float) -> Callable[[Recipe], float]:
    """Scores that are best at one learning rate."""
    return lambda recipe: 0.9 - abs(recipe.plan.lr - best)


def recipes_in(out: Path, prefix: str) -> dict[str, Recipe]:
    return {path.parent.name: ExperimentJob.claimed(path.parent).recipe for path in out.glob(f"{prefix}*/recipe.json")}


@pytest.fixture
def request_(tmp_path: Path) -> CompareRequest:
    return CompareRequest(tmp_path / "out", seeds=[0, 1], grid=RATES)


def table(request: CompareRequest) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((request.out / "table.json").read_text())
    return read


def found_in(out: Path) -> list[TunedRecipe]:
    tuning = read_contents(out).tuning
    assert tuning is not None
    return outcome(tuning, out)


def test_the_best_value_is_chosen_on_a_validation_part_and_trained_on_everything(
    recipe_of: Recipes, request_: CompareRequest, stand_in: Any
) -> None:
    stand_in.score = lambda recipe: peak(0.1 if recipe.method.name == "fedavg" else 0.4)(recipe)
    compare([recipe_of("fedavg"), recipe_of("fednh")], request_)
    tried, compared = recipes_in(request_.out, "tune-"), recipes_in(request_.out, "small-")
    assert len(tried) == 2 * 3 * 2
    assert {recipe.data and recipe.data.validation_fraction for recipe in tried.values()} == {0.2}
    assert {recipe.data and recipe.data.seed for recipe in tried.values()} == {0, 1}
    assert {name: recipe.plan.lr for name, recipe in compared.items()} == {
        "small-fedavg-lr-0-1-seed0": 0.1,
        "small-fedavg-lr-0-1-seed1": 0.1,
        "small-fednh-lr-0-4-seed0": 0.4,
        "small-fednh-lr-0-4-seed1": 0.4,
    }
    assert {recipe.data and recipe.data.validation_fraction for recipe in compared.values()} == {None}
    assert {recipe.name for recipe in compared.values()} == {"small-fedavg", "small-fednh"}
    of_avg, of_nh = table(request_)["tuning"]
    assert (of_avg["chosen"], of_nh["chosen"]) == ({"plan.lr": 0.1}, {"plan.lr": 0.4})
    assert (of_avg["at_edge"], of_nh["at_edge"]) == ([], ["plan.lr"])
    assert (of_avg["score"], of_avg["validation_fraction"]) == ("global.accuracy", 0.2)
    assert [trial["mean"] for trial in of_avg["trials"]] == pytest.approx([0.81, 0.9, 0.6])


def test_a_search_may_have_seeds_of_its_own(recipe_of: Recipes, request_: CompareRequest, stand_in: Any) -> None:
    stand_in.score = lambda recipe: peak(0.1 if recipe.seed == 7 else 0.4)(recipe)
    compare([recipe_of("fedavg")], replace(request_, tune_seeds=[7]))
    assert {recipe.seed for recipe in recipes_in(request_.out, "tune-").values()} == {7}
    compared = recipes_in(request_.out, "small-").values()
    assert {(recipe.seed, recipe.plan.lr) for recipe in compared} == {(0, 0.1), (1, 0.1)}


def test_a_search_goes_on_where_it_was_interrupted(recipe_of: Recipes, request_: CompareRequest, stand_in: Any) -> None:
    stand_in.score, stand_in.stop_after = peak(0.1), 4
    with pytest.raises(KeyboardInterrupt):
        compare([recipe_of("fedavg")], request_)
    assert read_contents(request_.out).jobs == ()
    stand_in.stop_after = 7  # in the midst of what is compared
    with pytest.raises(KeyboardInterrupt):
        compare([recipe_of("fedavg")], request_)
    stand_in.stop_after = 100
    compare([recipe_of("fedavg")], request_)
    assert len(stand_in.ran) == len(set(stand_in.ran)) == 3 * 2 + 2
    done = table(request_)
    compare([], CompareRequest(request_.out))
    assert table(request_) == done
    assert done["tuning"][0]["chosen"] == {"plan.lr": 0.1}


def test_settings_of_which_a_run_failed_are_not_chosen_and_not_tried_again(
    recipe_of: Recipes, request_: CompareRequest, stand_in: Any
) -> None:
    def score(recipe: Recipe) -> float:
        if recipe.plan.lr == 0.4 and recipe.seed == 1:
            raise OverflowError("the loss is nan")
        return recipe.plan.lr

    stand_in.score = score
    compare([recipe_of("fedavg")], request_)
    (tuned,) = table(request_)["tuning"]
    assert tuned["chosen"] == {"plan.lr": 0.1}
    assert [trial["failed"] for trial in tuned["trials"]] == [[], [], [1]]
    before = list(stand_in.ran)
    compare([recipe_of("fedavg")], request_)
    assert stand_in.ran == before


def test_without_settings_that_work_nothing_is_compared(
    recipe_of: Recipes, request_: CompareRequest, stand_in: Any
) -> None:
    def score(recipe: Recipe) -> float:
        raise OverflowError("the loss is nan")

    stand_in.score = score
    with pytest.raises(RunFailedError, match="small-fedavg: none of the settings"):
        compare([recipe_of("fedavg")], request_)
    assert len(stand_in.ran) == 3 * 2
    assert table(request_)["tuning"][0]["chosen"] is None


def test_a_search_that_lacks_a_run_chooses_nothing(recipe_of: Recipes, request_: CompareRequest, stand_in: Any) -> None:
    stand_in.broken = {"tune-small-fedavg-lr-0-4-seed1"}
    with pytest.raises(RunFailedError, match="1 of 6 jobs failed"):
        compare([recipe_of("fedavg")], request_)
    assert recipes_in(request_.out, "small-") == {}
    (tuned,) = found_in(request_.out)
    assert (tuned.chosen, tuned.trials[2].waiting) == (None, [1])
    stand_in.broken = set()
    compare([recipe_of("fedavg")], request_)
    assert stand_in.ran.count("tune-small-fedavg-lr-0-4-seed1") == 2
    assert len(recipes_in(request_.out, "small-")) == 2


def test_more_values_later_keep_what_was_tried(recipe_of: Recipes, request_: CompareRequest, stand_in: Any) -> None:
    stand_in.score = peak(0.8)
    compare([recipe_of("fedavg")], request_)
    first = len(stand_in.ran)
    compare([recipe_of("fedavg")], replace(request_, grid={"plan.lr": [*RATES["plan.lr"], 0.8]}))
    assert stand_in.ran[first:] == [
        *(f"tune-small-fedavg-lr-0-8-seed{seed}" for seed in (0, 1)),
        *(f"small-fedavg-lr-0-8-seed{seed}" for seed in (0, 1)),
    ]


def test_of_equal_scores_the_first_is_chosen_and_of_losses_the_lowest(
    recipe_of: Recipes, request_: CompareRequest, stand_in: Any
) -> None:
    compare([recipe_of("fedavg")], request_)
    assert table(request_)["tuning"][0]["chosen"] == {"plan.lr": 0.01}
    (found,) = found_in(request_.out)
    assert found.score is not None
    trials = [replace(trial, scores={0: loss}) for trial, loss in zip(found.trials, (0.3, 0.1, 0.2), strict=True)]
    by_loss = replace(found, score=replace(found.score, lower_is_better=True), trials=trials)
    assert by_loss.chosen is not None
    assert by_loss.chosen.settings == {"plan.lr": 0.1}


@pytest.mark.parametrize(
    ("by", "score"),
    [((), "global.accuracy"), (("personal.pm_v",), "personal.pm_v"), (("global.few", "loss:worst"), "loss:worst")],
)
def test_the_score_that_chooses_is_named(
    by: tuple[str, ...], score: str, recipe_of: Recipes, request_: CompareRequest, stand_in: Any
) -> None:
    recipe = recipe_of("fedavg", evaluation={"frequency_groups": True})
    compare([recipe], replace(request_, tune_by=by))
    assert table(request_)["tuning"][0]["score"] == score
    assert score in (request_.out / "table.md").read_text()


def test_several_keys_make_a_grid(recipe_of: Recipes, request_: CompareRequest, stand_in: Any) -> None:
    grid = read_grid(["plan.lr=0.1,0.2", "method.mu=1.0,10"])
    compare([recipe_of("fedprox")], replace(request_, seeds=[3], grid=grid))
    assert {(r.plan.lr, r.method.options["mu"]) for r in recipes_in(request_.out, "tune-").values()} == {
        (0.1, 1.0),
        (0.1, 10),
        (0.2, 1.0),
        (0.2, 10),
    }
    assert (request_.out / "small-fedprox-lr-0-1-mu-1-0-seed3").is_dir()


def test_a_recipes_own_validation_part_is_the_searchs(
    recipe_of: Recipes, request_: CompareRequest, stand_in: Any
) -> None:
    recipe = recipe_of("fedavg")
    assert recipe.data is not None
    data = recipe.data.model_copy(update={"validation_fraction": 0.4})
    compare([recipe.model_copy(update={"data": data})], request_)
    assert {r.data and r.data.validation_fraction for r in recipes_in(request_.out, "tune-").values()} == {0.4}
    assert {r.data and r.data.validation_fraction for r in recipes_in(request_.out, "small-").values()} == {None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": None}, r"no \[data\]"),
        ({"data": {"source": "digits", "local_test_fraction": 0.25}}, "local_test_fraction"),
    ],
)
def test_what_has_no_validation_part_is_not_tuned(
    changes: dict[str, Any], said: str, recipe_of: Recipes, request_: CompareRequest, stand_in: Any
) -> None:
    with pytest.raises(ConfigError, match=said):
        compare([recipe_of("fedavg", **changes)], request_)
    assert stand_in.ran == []


def test_bad_searches_are_refused_before_a_job_runs(
    recipe_of: Recipes, request_: CompareRequest, stand_in: Any
) -> None:
    for grid, by, said in (
        ({"plan.lrr": [1]}, (), "did you mean 'lr'"),
        ({"paln.lr": [1]}, (), "no table 'paln'"),
        (RATES, ("global.acuracy",), r"'global\.accuracy'"),
        ({}, ("loss",), "--tune"),
    ):
        with pytest.raises(ConfigError, match=said):
            compare([recipe_of("fedavg")], replace(request_, grid=grid, tune_by=by))
    with pytest.raises(ConfigError, match="--tune-seeds"):
        compare([recipe_of("fedavg")], replace(request_, grid={}, tune_seeds=[0]))
    for texts in (["plan.lr=0.1,0.1"], ["plan.lr=0.1", "plan.lr=0.2"], ["plan.lr"]):
        with pytest.raises(ConfigError, match=r"plan\.lr"):
            read_grid(texts)
    assert stand_in.ran == []
