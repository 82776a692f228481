"""Jobs, their folders and their results; what is printed of them is worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tests.support.results import result_of

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, DataError, StateError
from protofed.deploy import shipped
from protofed.deploy.experiments.compare import CompareRequest, compare, read_seeds
from protofed.deploy.experiments.curves import collect_curves, draw, over_rounds
from protofed.deploy.experiments.experiment import (
    ExperimentContents,
    ExperimentJob,
    plan_jobs,
    read_contents,
    refuse_foreign,
    varied,
    write_contents,
)
from protofed.deploy.experiments.shown import as_json, caption, comma_separated, markdown, show
from protofed.deploy.experiments.table import CompareOptions, Comparison
from protofed.deploy.plots import spaced

Recipes = Callable[..., Recipe]


@pytest.fixture
def compared(recipe_of: Recipes) -> Comparison:
    """FedAvg with two seeds; FedNH with one of two done."""
    avg, nh = recipe_of("fedavg"), recipe_of("fednh")
    other = nh.model_copy(update={"seed": 1})
    done = [(result.recipe, result) for result in (result_of(avg, 0, 0.2, 0.5), result_of(avg, 1, 0.3, 0.7))]
    return Comparison.of([*done, (nh, result_of(nh, 0, 0.1, 0.25)), (other, None)])


def test_a_seed_is_that_of_the_run_and_tells_jobs_apart(recipe_of: Recipes, tmp_path: Path) -> None:
    jobs = plan_jobs([recipe_of("fedavg"), recipe_of("fednh")], [4, 7], None, tmp_path)
    names = ["small-fedavg-seed4", "small-fednh-seed4", "small-fedavg-seed7", "small-fednh-seed7"]
    assert [job.name for job in jobs] == names
    assert [(job.recipe.seed, job.recipe.data and job.recipe.data.seed) for job in jobs] == [(4, 4)] * 2 + [(7, 7)] * 2
    for most, rounds in ((1, 1), (9, 3)):  # shortened, never lengthened
        assert [job.recipe.rounds for job in plan_jobs([recipe_of("fedavg")], None, most, tmp_path)] == [rounds]
    (own,) = plan_jobs([recipe_of("fedavg", seed=3)], None, None, tmp_path)
    assert (own.name, own.recipe.data and own.recipe.data.seed) == ("small-fedavg-seed3", 0)
    with pytest.raises(ConfigError, match=r"two recipes .*'small-fedavg'"):
        plan_jobs([recipe_of("fedavg"), recipe_of("fedavg", seed=1)], None, None, tmp_path)
    with pytest.raises(ConfigError, match="each once"):
        plan_jobs([recipe_of("fedavg")], [1, 1], None, tmp_path)
    with pytest.raises(ConfigError, match=r"no \[data\]"):
        plan_jobs([recipe_of("fedavg", data=None)], [1], None, tmp_path)


@pytest.mark.parametrize("text", ["", "1,", "a", "1 2", "-1", "1,,2"])
def test_seeds_are_numbers_with_commas(text: str) -> None:
    assert read_seeds("0,12,3") == [0, 12, 3]
    assert read_seeds(None) is None
    with pytest.raises(ConfigError, match="0,1,2"):
        read_seeds(text)


def test_a_job_keeps_its_recipe_and_its_result(recipe_of: Recipes, tmp_path: Path) -> None:
    job = ExperimentJob(recipe_of("fedavg"), tmp_path / "small-fedavg-seed0")
    job.check()
    job.claim()
    job.check()
    assert ExperimentJob.claimed(job.folder) == job
    changed = recipe_of("fedavg", plan={**job.recipe.plan.model_dump(), "lr": 0.5})
    with pytest.raises(StateError, match=r"plan\.lr is 0\.05 there and 0\.5 here"):
        ExperimentJob(changed, job.folder).check()
    with pytest.raises(StateError, match="holds no job"):
        ExperimentJob.claimed(tmp_path / "nothing")
    job = ExperimentJob(recipe_of("fedavg"), tmp_path)
    assert job.result() is None
    wrote = result_of(job.recipe, 0, 0.1, 0.2)
    job.write_result(wrote)
    assert job.result() == wrote
    table = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    del table["recipe"]["federation"]["grace"], table["recipe"]["plan"]["augmentation"]
    (tmp_path / "result.json").write_text(json.dumps(table), encoding="utf-8")
    assert job.result() == wrote


def test_a_folder_with_something_else_is_refused(recipe_of: Recipes, tmp_path: Path) -> None:
    refuse_foreign(tmp_path / "new")
    (tmp_path / "lock").touch()
    refuse_foreign(tmp_path)
    with pytest.raises(StateError, match="holds no comparison"):
        read_contents(tmp_path)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(StateError, match="--out"):
        refuse_foreign(tmp_path)
    with pytest.raises(StateError, match="is a file"):
        refuse_foreign(tmp_path / "thesis.txt")
    contents = ExperimentContents(jobs=("small-fedavg-seed0", "small-fedavg-seed2"), shortened=5)
    write_contents(tmp_path, contents)
    refuse_foreign(tmp_path)
    assert read_contents(tmp_path) == contents
    (tmp_path / "comparison.json").write_text('{"jobs": ["a-seed0"], "shortened": null}')  # of before 0.2.1
    assert read_contents(tmp_path) == ExperimentContents(jobs=("a-seed0",))


def test_a_table_has_means_over_seeds_and_its_files_exact_fractions(compared: Comparison) -> None:
    avg, nh = (dict(zip(*lines, strict=True)) for lines in _rows(markdown(compared)))
    assert avg["recipe"] == "small-fedavg"
    assert (avg["seeds"], nh["seeds"]) == ("2", "1 of 2")
    assert (avg["GM"], nh["GM"]) == ("60.0 ± 14.1", "25.0")  # sqrt(0.1² + 0.1²), over n - 1 = 1
    assert avg["worst class"] == "10.0 ± 0.0"
    assert avg["PM(V)"] == "60.0 ± 0.0"
    assert avg["worst site"] == "50.0 ± 0.0"
    assert avg["fairness"] == "20.0 ± 0.0"
    assert avg["local"] == "80.0 ± 0.0"  # (3 * 1.0 + 1 * 0.2) / 4
    assert "few" not in avg
    assert "sample standard deviation (n - 1) over seeds" in caption(compared)
    lines = [line.split(",")[:3] for line in comma_separated(compared).splitlines()]
    assert lines[0] == ["recipe", "seed", "GM"]
    assert lines[1:5] == [["small-fedavg", *cells] for cells in (["0", "0.5"], ["1", "0.7"], ["mean", "0.6"])] + [
        ["small-fedavg", "std", lines[4][2]]
    ]
    assert float(lines[4][2]) == pytest.approx(0.02**0.5)  # of 0.5 and 0.7, over n - 1 = 1
    read = json.loads(as_json(compared))
    assert read["rows"][1]["values"]["GM"] == {"mean": 0.25, "std": None, "seeds": {"0": 0.25}}
    assert read["rows"][0]["seconds"] == {"0": 1.5, "1": 1.5}


@pytest.mark.parametrize(
    ("avg", "nh", "said"),
    [
        (None, None, ""),
        (2000, 2000, " Sites' own models: on a stratified 2,000 of 10,000 test images."),
        (None, 2000, " Sites' own models: on a stratified 2,000 of 10,000 test images (small-fednh)."),
        (10_000, 20_000, ""),  # all of them
    ],
)
def test_the_caption_says_on_how_many_test_images_own_models_were_scored(
    avg: int | None, nh: int | None, said: str, recipe_of: Recipes
) -> None:
    recipes = [recipe_of(m, evaluation={"personal_test_images": n}) for m, n in (("fedavg", avg), ("fednh", nh))]
    results = [(r, result_of(r, 0, 0.2).model_copy(update={"test_images": 10_000})) for r in recipes]
    made = Comparison.of(results)
    assert caption(made).endswith(f"In %.{said}")
    assert [row["personal_test_images"] for row in json.loads(as_json(made))["rows"]] == [avg, nh]


@pytest.mark.parametrize(
    ("noisy", "said"), [((), ""), (("fedavg",), " (small-fedavg)"), (("fedavg", "fedprox"), "")], ids=len
)
def test_the_caption_says_whose_own_scores_stay_because_of_noise(
    noisy: Sequence[str], said: str, recipe_of: Recipes
) -> None:
    dp = {"noise_multiplier": 1.0, "max_unit_norm": 1.0, "sampling_rate": 0.1}
    plans = {m: {"batch_size": 16, "lr": 0.1, **({"dp": dp} if m in noisy else {})} for m in ("fedavg", "fedprox")}
    recipes = [recipe_of(method, plan=plan) for method, plan in plans.items()]
    text = caption(Comparison.of([(recipe, result_of(recipe, 0, 0.2)) for recipe in recipes]))
    assert (f" With plan.dp{said} " in text) is bool(noisy)
    assert ("plan.dp" in text) is bool(noisy)


@pytest.mark.parametrize(
    ("metric", "nearest"),
    [
        ("global.acuracy", r"'global\.accuracy'"),
        ("loss:wurst", "'worst'"),
        ("global.auroc", "auroc"),
        ("x", "one of"),
        ("personal.pm_v:held-out", "held_out_sites"),
    ],
)
def test_a_column_that_no_run_will_have_is_refused_before_the_first_job(
    recipe_of: Recipes, tmp_path: Path, metric: str, nearest: str
) -> None:
    request = CompareRequest(tmp_path / "out", metrics=["personal.recall.3", "loss:std", "train.mine", metric])
    with pytest.raises(ConfigError, match=nearest):
        compare([recipe_of("fedavg")], request)
    assert not (tmp_path / "out").exists()


def test_each_known_column_is_named_once(recipe_of: Recipes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as found:
        compare([recipe_of("fedavg")], CompareRequest(tmp_path / "out", metrics=["x"]))
    names = str(found.value).partition("expected one of: ")[2].split(", ")
    assert len(names) == len(set(names))


def test_columns_may_be_named_and_need_sizes(recipe_of: Recipes) -> None:
    recipe = recipe_of("fedavg")
    metrics = ["loss", "personal.pm_v:worst", "personal.pm_v:active", "global.accuracy:recent", "loss:std"]
    held_out = {"site-8": {"personal.pm_v": 0.3}, "site-9": {"personal.pm_v": 0.9}}
    result = result_of(recipe, 0, 0.2, 0.4).model_copy(update={"held_out": held_out})
    options = CompareOptions([*metrics, "personal.pm_v:held-out"], shortened=7)
    comparison = Comparison.of([(recipe, result)], options)
    (cells,) = _rows(markdown(comparison))
    assert dict(zip(*cells, strict=True)) == {
        "recipe": "small-fedavg",
        "seeds": "1",
        "loss": "1.5000",
        "personal.pm_v:worst": "50.0",
        "personal.pm_v:active": "50.0",
        "global.accuracy:recent": "30.0",
        "loss:std": "0.5000",
        "personal.pm_v:held-out": "60.0",
    }
    assert "ounds shortened to 7" in caption(comparison)
    assert "over seeds" not in caption(comparison)
    with pytest.raises(ConfigError, match=r"'global\.accuracy'"):
        Comparison.of([(recipe, result_of(recipe, 0, 0.2))], CompareOptions(["global.acuracy"]))
    with pytest.raises(ConfigError, match="'worst'"):
        Comparison.of([(recipe, result_of(recipe, 0, 0.2))], CompareOptions(["loss:wurst"]))
    result = result_of(recipe, 0, 0.2).model_copy(update={"local_test_examples": {"site-1": 3}})
    with pytest.raises(DataError, match="site-2"):
        Comparison.of([(recipe, result)])


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_table_that_is_too_wide_is_cut_and_nothing_of_it_is_lost(width: int, compared: Comparison) -> None:
    text = StringIO()
    show(compared, Console(file=text, width=width))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    table = "".join(lines[: next(place for place, line in enumerate(lines) if line.startswith("GM: "))])
    for cell in ("60.0 ± 14.1", "1 of 2", *(column.header for column in compared.columns)):
        assert cell in table
    assert "…" not in table


def test_curves_are_drawn_of_what_there_is(compared: Comparison, tmp_path: Path) -> None:
    earlier, foreign = tmp_path / "curve-global-balanced_accuracy.png", tmp_path / "curve-of-mine.png"
    earlier.touch()
    foreign.touch()
    paths = draw(collect_curves(compared.results), tmp_path)
    names = ("global-accuracy", "personal-pm_v", "personal-pm_l", "personal-local-accuracy")
    assert {path.name for path in paths} == {f"curve-{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert all(path.read_bytes().startswith((b"\x89PNG", b"<?xml")) for path in paths)
    assert set(tmp_path.iterdir()) == {*paths, foreign}
    (again := tmp_path / "again").mkdir()
    for path in draw(collect_curves(compared.results)[:1], again):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_a_curve_has_the_rounds_that_all_seeds_have(recipe_of: Recipes) -> None:
    recipe = recipe_of("fedavg")
    found = over_rounds([result_of(recipe, 0, 0.2, 0.5, 0.6), result_of(recipe, 1, 0.3, 0.7)], "global.accuracy")
    assert found is not None
    assert found[0] == [1, 2]
    np.testing.assert_array_equal(found[1], [[0.2, 0.5], [0.3, 0.7]])
    assert over_rounds([result_of(recipe, 0, 0.2)], "global.few") is None


@pytest.mark.parametrize("heights", [[], [0.5], [0.5, 0.5, 0.5], [1.0, 0.99, 0.2], [0.0, 0.01, 0.02], [0.1, 0.9] * 20])
def test_names_at_the_ends_of_lines_are_apart_and_in_order(heights: list[float]) -> None:
    moved = spaced(heights, 0.05)
    gap = min(0.05, 1 / max(len(heights) - 1, 1))
    assert np.all(np.diff(sorted(moved)) >= gap - 1e-9)
    assert all(-1e-9 <= height <= 1 + 1e-9 for height in moved)
    assert sorted(range(len(moved)), key=lambda k: moved[k]) == sorted(range(len(heights)), key=lambda k: heights[k])


def test_useless_models_are_named_below_the_table_the_first_ones_of_many(
    compared: Comparison, recipe_of: Recipes
) -> None:
    assert compared.warnings == []
    assert all(row["warnings"] == [] for row in json.loads(as_json(compared))["rows"])
    recipe = recipe_of("fedavg")
    useless = result_of(recipe, 4, 0.663)
    useless.scores[1]["evaluator"] |= {"global.recall.0": 1.0, "global.recall.1": 0.0}
    comparison = Comparison.of([(useless.recipe, useless)])
    ((label, seed, warning),) = comparison.warnings
    assert (label, seed, warning.code) == ("small-fedavg", 4, "one-class")
    (row,) = json.loads(as_json(comparison))["rows"]
    assert row["warnings"] == [{"seed": 4, **warning.plain()}]
    console = Console(width=200)
    with console.capture() as captured:
        show(comparison, console)
    for text in (captured.get(), markdown(comparison)):
        assert f"small-fedavg, seed 4: one-class: {warning.text}" in text.splitlines()
    result = result_of(recipe_of("fedavg"), 0, 0.5)
    one_class = {"personal.local.recall.0": 1.0, "personal.local.recall.1": 0.0}
    result.scores[1].update({f"site-{number}": dict(one_class) for number in range(5)})
    (line,) = (row for row in markdown(Comparison.of([(result.recipe, result)])).splitlines() if "more:" in row)
    assert line == "small-fedavg, seed 0: and 2 own models more: --format json"


def _rows(text: str) -> list[tuple[list[str], list[str]]]:
    """Each row of the first markdown table with the headers."""
    table = text.partition("\n\n")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [(lines[0], row) for row in lines[2:]]


def test_a_recipe_is_varied_over_the_values_of_a_key() -> None:
    made = varied([shipped.recipe("digits-fednh"), shipped.recipe("digits-fedprp")], "plan.lr=0.5,0.25")
    assert [recipe.plan.lr for recipe in made] == [0.5, 0.25, 0.5, 0.25]
    assert [recipe.name for recipe in made] == [
        "digits-fednh-lr-0-5",
        "digits-fednh-lr-0-25",
        "digits-fedprp-lr-0-5",
        "digits-fedprp-lr-0-25",
    ]
    apart = varied([shipped.recipe("digits-fedprox")], "method.mu=1.0,10,0.1,0.01")
    assert len({recipe.name for recipe in apart}) == 4
    options = [
        recipe.method.options for recipe in varied([shipped.recipe("digits-fednh")], "method.prototype_momentum=0.1")
    ]
    assert options == [{"prototype_momentum": 0.1, "scale": 10.0}]


@pytest.mark.parametrize(
    ("vary", "said"),
    [
        ("method.prototype_momentum", "expected a key and values"),
        ("method.prototype_momentum=", "expected a key and values"),
        ("method.distance=cosine", "text needs quotes"),
        ("methods.prototype_momentum=1", "no table 'methods'"),
        ("plan.lrr=0.1", r"unknown key 'plan\.lrr': did you mean 'lr'"),
        ("plan.lr=-1.0", r"plan\.lr = -1\.0"),
    ],
)
def test_what_cannot_be_varied_is_refused(vary: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        varied([shipped.recipe("digits-fednh")], vary)
