"""The numbers behind pictures are worked out by hand; the pictures of tiny runs are drawn and are files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import results

from protofed.common.config.recipe import Recipe
from protofed.common.config.tables import NamedOptions
from protofed.common.errors import ConfigError, StateError
from protofed.common.payload import Part
from protofed.deploy import shipped
from protofed.deploy.cli import main
from protofed.deploy.experiments.experiment import ExperimentJob, Result
from protofed.deploy.experiments.job import run_job
from protofed.deploy.figures.figures import FiguresRequest, ablation, draw, draw_ablation, group_recalls, read_option
from protofed.deploy.figures.finished_run import FinishedRun, embedded, open_run
from protofed.deploy.figures.matrices import (
    CIFAR100,
    cosines,
    first_prototypes,
    norm_shares,
    read_groups,
    read_shares,
    within_and_between,
)
from protofed.deploy.figures.plane import by_angle, on_ring, tsne
from protofed.deploy.simulation.simulation import simulation

Recipes = Callable[..., Recipe]
Finished = Callable[[str], FinishedRun]


@pytest.fixture(scope="module")
def folders(recipe_of: Recipes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished jobs of two rounds by method, and one on the spiral."""
    out = tmp_path_factory.mktemp("jobs")
    recipes = {method: tiny(recipe_of, method) for method in ("fednh", "cwfedavg", "fedprp", "solo")}
    recipes["spiral"] = shipped.recipe("spiral-fedavg-balanced").model_copy(update={"rounds": 1})
    for name, recipe in recipes.items():
        job = ExperimentJob(recipe, out / name)
        job.claim()
        run_job(job, torch.device("cpu"), deaf)
    return {name: out / name for name in recipes}


@pytest.fixture
def finished(folders: dict[str, Path]) -> Finished:
    return lambda name: open_run(folders[name])


def tiny(recipe_of: Recipes, method: str) -> Recipe:
    return recipe_of(method, rounds=2, model={"name": "mlp", "hidden": [16]})


def deaf(done: int, doing: str) -> None:
    """Hears how a job gets on."""


def kinds(paths: Sequence[Path]) -> Counter[str]:
    """Pictures by name; each has both formats, and something in it."""
    assert all(path.read_bytes().startswith((b"\x89PNG", b"<?xml")) for path in paths)
    counted = Counter(path.stem for path in paths)
    assert set(counted.values()) == {2}
    return counted


def test_cosines_groups_and_shares_by_hand() -> None:
    rows = np.array([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(cosines(rows), [[1, 0, -1, 0], [0, 1, 0, 0], [-1, 0, 1, 0], [0, 0, 0, 0]])
    similarity = np.array([[1, 0.5, 0.1], [0.5, 1, 0.3], [0.1, 0.3, 1]])
    assert within_and_between(similarity, {"a": [0, 1], "b": [2]}) == pytest.approx((0.5, 0.2))
    assert within_and_between(similarity, {"all": [0, 1, 2]}) is None
    np.testing.assert_allclose(norm_shares(np.array([[3.0, 4.0], [0.0, -5.0], [0.0, 0.0]])), [0.5, 0.5, 0])
    scores = {f"global.recall.{c}": c / 10 for c in range(10)}
    assert group_recalls(scores, 10) == pytest.approx({"many": 0.05, "medium": 0.3, "few": 0.7, "all": 0.45})
    turned = group_recalls(scores, 10, tuple(range(9, -1, -1)))
    assert turned == pytest.approx({"many": 0.85, "medium": 0.6, "few": 0.2, "all": 0.45})
    assert group_recalls(scores, 11) == {}
    assert "many" not in group_recalls(scores, 4)
    assert read_groups("b: 2,0; a:1", "digits", 3) == {"b": [2, 0], "a": [1]}
    assert read_groups("a:1", "digits", 3) == {"a": [1], "others": [0, 2]}
    assert read_groups(None, "digits", 3) == {"classes": [0, 1, 2]}
    assert read_groups(None, "cifar10", 10)["vehicles"] == [0, 1, 8, 9]
    assert sorted(c for members in CIFAR100.values() for c in members) == list(range(100))
    assert {len(members) for members in CIFAR100.values()} == {5}
    for text in ("", "a", "a:", ":1", "a:x", "a:1;b:1", "a:7", "a:-1"):
        with pytest.raises(ConfigError, match="group"):
            read_groups(text, "digits", 3)


@pytest.mark.parametrize("seed", [0, 3])
def test_first_prototypes_are_those_that_the_run_began_with(seed: int, recipe_of: Recipes, tmp_path: Path) -> None:
    recipe = tiny(recipe_of, "fednh").model_copy(update={"rounds": 1, "seed": seed})
    with simulation(recipe, tmp_path) as running:
        running.go(until=lambda: running.run.published is not None)
        published = running.run.published
        running.go()
    again = first_prototypes(open_run(tmp_path, recipe))
    off_diagonal = cosines(again)[~np.eye(10, dtype=bool)]
    np.testing.assert_allclose(off_diagonal, -1 / 9, atol=1e-6)  # a simplex
    assert published is not None
    np.testing.assert_array_equal(published.state[Part.PROTOTYPES]["mean"], again)


def test_shares_are_of_sites_and_of_class_models(finished: Finished) -> None:
    run = finished("cwfedavg")
    found = read_shares(run)
    assert (found.true.shape, found.local.shape, found.models.shape) == ((3, 10), (3, 10), (10, 10))
    for rows in (found.true, found.local, found.models):
        np.testing.assert_allclose(rows.sum(1), 1, atol=1e-5)
    counts = run.sites()["site-2"].train.labels.bincount(minlength=10).numpy()
    np.testing.assert_allclose(found.true[1], counts / counts.sum(), atol=1e-6)
    sent = run.state[Part.CLASS_SHARES]["site-2"]  # what the server was told in the last round
    np.testing.assert_allclose(found.local[1], sent, atol=1e-6)
    assert found.gap == pytest.approx(np.mean(np.linalg.norm(found.true - found.local, axis=1)))


@pytest.mark.parametrize("method", ["fednh", "fedprp"])
def test_what_is_drawn_is_the_model_that_was_scored(method: str, finished: Finished) -> None:
    run = finished(method)
    data = run.test()
    model = run.global_model(data)
    right = [(model(x).argmax(1) == y).float() for x, y in data.ordered(data.test, 512)]
    assert float(torch.cat(right).mean()) == pytest.approx(run.scores["global.accuracy"])
    seen = embedded(run, 40)
    assert (len(seen.labels), len(seen.features)) == (40, 40)
    assert sorted(seen.prototypes) == list(range(10))
    assert np.allclose(np.linalg.norm(seen.features, axis=1), 1, atol=1e-5) == (method == "fednh")


def test_tsne_is_deterministic_and_places_a_prototype_among_its_class() -> None:
    rng = np.random.default_rng(0)
    centres = {0: np.zeros(5), 1: np.full(5, 9.0)}
    features = np.concatenate([centre + rng.normal(0, 0.3, (20, 5)) for centre in centres.values()])
    points, marks = tsne(features, centres)
    again, _ = tsne(features, centres)
    np.testing.assert_array_equal(points, again)
    middles = [points[:20].mean(0), points[20:].mean(0)]
    for c, mark in marks.items():
        assert np.linalg.norm(mark - middles[c]) < np.linalg.norm(mark - middles[1 - c])
    assert tsne(features, {})[0].shape == (40, 2)


def test_a_ring_keeps_angles_and_heads_point_with_their_rows(finished: Finished) -> None:
    features = np.array([[3.0, 0.0], [0.0, -0.1]])
    ring = on_ring(features, np.array([0, 1]))
    np.testing.assert_allclose(ring / np.linalg.norm(ring, axis=1, keepdims=True), [[1, 0], [0, -1]], atol=1e-12)
    assert np.all(np.abs(np.linalg.norm(ring, axis=1) - 1) <= 0.11)
    run = finished("spiral")
    plane = by_angle(run, embedded(run, 50))
    weight = run.state[Part.HEAD]["weight"]
    assert sorted(plane.marks) == list(range(6))
    np.testing.assert_allclose(plane.marks[3], weight[3] / np.linalg.norm(weight[3]), atol=1e-6)


def result_of(recipe: Recipe, accuracy: float) -> Result:
    scores = {recipe.rounds: {"evaluator": {"global.accuracy": accuracy}}}
    changes = {"scores": scores, "cohorts": {recipe.rounds: ()}, "train_examples": {}, "local_test_examples": {}}
    return results.result_of(recipe, recipe.seed).model_copy(update=changes)


def test_an_ablation_goes_over_one_number_and_all_seeds(recipe_of: Recipes) -> None:
    def made(rho: float | None, accuracy: float, seed: int = 0, **more: object) -> Result:
        recipe = recipe_of("fednh", name=f"rho-{seed}-{100 * accuracy:.0f}", seed=seed, **more)
        method = NamedOptions.model_validate(
            {"name": "fednh"} if rho is None else {"name": "fednh", "prototype_momentum": rho}
        )
        return result_of(recipe.model_copy(update={"method": method}), accuracy)

    results = [made(None, 0.9), made(0.1, 0.5), made(0.1, 0.7, seed=1)]  # the default is 0.9
    found = ablation(results, "method.prototype_momentum", "global.accuracy")
    assert (found.values, found.scores, found.percent) == ([0.1, 0.9], [[0.5, 0.7], [0.9]], True)
    assert [text.get_text() for text in draw_ablation(found).axes[0].get_xticklabels()] == ["0.1", "0.9"]
    with pytest.raises(ConfigError, match="differ in rounds, too"):
        ablation([*results, made(0.5, 0.1, rounds=7)], "method.prototype_momentum", "global.accuracy")
    with pytest.raises(ConfigError, match="expected several values"):
        ablation(results[1:], "method.prototype_momentum", "global.accuracy")
    with pytest.raises(ConfigError, match=r"'global\.accuracy'"):
        ablation(results, "method.prototype_momentum", "global.acuracy")
    with pytest.raises(ConfigError, match="finished"):
        ablation([], "method.prototype_momentum", "global.accuracy")
    recipe = recipe_of("cwfedavg")
    assert [read_option(recipe, name) for name in ("method.wdr", "plan.lr", "data.partition.beta")] == [5.0, 0.05, 0.5]
    for name in ("method.nothing", "method.name", "plan", "plan.drop_last"):
        with pytest.raises(ConfigError, match="expected the name of a number"):
            read_option(recipe, name)


def test_each_method_has_its_pictures(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("protofed.deploy.figures.figures.MAX_EXAMPLES", 60)
    own = draw(FiguresRequest([folders["cwfedavg"]]))
    assert set(kinds(own)) == {"norms-cwfedavg"}
    assert own[0].parent == folders["cwfedavg"] / "figures"
    both = [folders["fednh"], folders["fedprp"]]
    asked = FiguresRequest(both, tmp_path, groups="round:0,6,8,9")
    planned = draw(replace(asked, dry_run=True))
    assert list(tmp_path.iterdir()) == []
    drawn = draw(asked)
    assert planned == drawn
    assert set(kinds(drawn)) == {"prototypes-fednh", "tsne", "groups"}
    with pytest.raises(SystemExit) as ended:
        main.main(["figures", str(folders["spiral"]), "--out", str(tmp_path / "spiral")])
    assert not ended.value.code
    told = capsys.readouterr().out.split()
    assert set(kinds([Path(path) for path in told])) == {"directions", "groups"}
    with pytest.raises(ConfigError, match="there are no pictures of solo"):
        draw(FiguresRequest([folders["solo"]]))


def test_a_simulations_state_needs_its_recipe(folders: dict[str, Path], recipe_of: Recipes, tmp_path: Path) -> None:
    state = folders["fednh"] / "state"
    with pytest.raises(ConfigError, match="--recipe"):
        open_run(state)
    run = open_run(state, tiny(recipe_of, "fednh"))
    assert run.label == "small-fednh"
    assert run.personal("site-1") is not None
    with pytest.raises(StateError, match="holds no simulation"):
        open_run(tmp_path / "nothing", recipe_of("fednh"))
    assert not (tmp_path / "nothing").exists()


def test_a_run_that_goes_on_is_not_drawn(recipe_of: Recipes, tmp_path: Path) -> None:
    recipe = recipe_of("fedavg")
    with simulation(recipe, tmp_path) as running:
        running.go(until=lambda: running.run.published is not None)
    with pytest.raises(StateError, match="has not ended well"):
        open_run(tmp_path, recipe)
