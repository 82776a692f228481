"""Models of each task are exported and predict what the run scored; card and table use the task's words."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load, save
from sklearn.metrics import roc_auc_score
from tests.support.finished_runs import FinishedRun, finished_run, probabilities
from tests.support.task_recipes import FINDINGS, OWN, task_recipe

from protofed.common import codec, plugins
from protofed.common.errors import ConfigError
from protofed.deploy.export import model_folder
from protofed.deploy.export import predict as predict_module
from protofed.deploy.export.export import ExportRequest, export
from protofed.deploy.export.images import ImageSource
from protofed.deploy.export.model_folder import CARD, GRAPH, WEIGHTS, ModelContents
from protofed.deploy.export.predict import Predictor, PredictRequest, predict

TASKS = ("multi-label", "regression", "own")
RUNTIMES: tuple[Literal["torch", "onnx"], ...] = ("torch", "onnx")
Folders = Callable[[str, str], tuple[FinishedRun, Path]]


@pytest.fixture(autouse=True, scope="module")
def allowed() -> None:
    """For the rest of the worker's process: the names of other test packages are refused as before."""
    plugins.allow(frozenset({OWN}))


def auroc(found: NDArray[np.float32], targets: NDArray[np.float32]) -> float:
    return float(np.mean([roc_auc_score(targets[:, c], found[:, c]) for c in range(targets.shape[1])]))


def mae(found: NDArray[np.float32], targets: NDArray[np.float32]) -> float:
    return float(np.abs(found[:, 0] - targets).mean())


SCORES = {"multi-label": ("auroc", auroc), "regression": ("mae", mae), "own": ("mae", mae)}
WORDS: dict[str, tuple[list[str], list[str]]] = {
    "multi-label": (
        [
            "A model that predicts findings in images (mlp, 3 findings)",
            "the probability of each finding; an image may have several findings, or none.",
            "## Findings",
            "It knows no other findings",
            "| global.auroc |",
        ],
        ["class", "softmax", "argmax"],
    ),
    "regression": (
        [
            "A model that predicts a number for each image (mlp), trained",
            "one number an image, from 0 to 9.",
            "## Numbers",
            "It always answers with a number in its range",
            "| global.mae |",
        ],
        ["class", "softmax", "robabilit", "argmax"],
    ),
    "own": (["A model for the task tests.client", "| global.near |"], ["softmax", "robabilit", "argmax"]),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a task's global or personal model, in both formats. No test may change it."""
    made: dict[tuple[str, str], tuple[FinishedRun, Path]] = {}

    def make(task: str, kind: str) -> tuple[FinishedRun, Path]:
        if (task, kind) not in made:
            folder = tmp_path_factory.mktemp("exported") / "model"
            done = finished_run(task_recipe(task, "ditto", model={"name": "mlp", "hidden": [16]}).model_dump_json())
            site, own = done.site("site-1"), frozenset({OWN})
            export(ExportRequest(done.run, kind, folder, state=done.state, site_state=site, allowed=own))
            made[task, kind] = done, folder
        return made[task, kind]

    return make


@pytest.mark.parametrize("kind", ["global", "personal"])
@pytest.mark.parametrize("task", TASKS)
def test_files_predict_what_the_run_scored(task: str, kind: str, exported: Folders) -> None:
    done, folder = exported(task, kind)
    name, score = SCORES[task]
    recorded = done.scores["evaluator" if kind == "global" else "site-1"][f"{kind}.{name}"]
    for runtime in RUNTIMES:
        found = probabilities(folder, done.test.pixels().numpy(), frozenset({OWN}), runtime)
        assert score(found, done.test.labels.numpy()) == pytest.approx(recorded, abs=1e-5)
    assert model_folder.read(folder).scores.values[f"{kind}.{name}"] == recorded


@pytest.mark.parametrize("task", TASKS)
def test_the_card_uses_the_words_of_the_task(task: str, exported: Folders) -> None:
    _, folder = exported(task, "global")
    text = (folder / CARD).read_text(encoding="utf-8")
    present, absent = WORDS[task]
    assert [words for words in present if words not in text] == []
    assert [words for words in absent if words in text] == []


def table(folder: Path, done: FinishedRun, out: Path, runtime: Literal["torch", "onnx"]) -> list[list[str]]:
    np.savez(out / "some.npz", images=done.test.pixels()[:7, 0].numpy())
    predict(PredictRequest(folder, ImageSource(out / "some.npz", False, None), out / "p.csv", runtime))
    with (out / "p.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_table_has_a_column_for_each_output(
    runtime: Literal["torch", "onnx"], exported: Folders, tmp_path: Path
) -> None:
    for task, names in (("multi-label", FINDINGS), ("regression", ("value",))):
        done, folder = exported(task, "global")
        heading, *rows = table(folder, done, tmp_path, runtime)
        assert heading == ["path", *names]
        assert [row[0] for row in rows] == [f"some.npz#{n}" for n in range(7)]
        expected = probabilities(folder, done.test.pixels()[:7].numpy(), runtime=runtime)
        np.testing.assert_allclose(np.array([row[1:] for row in rows], float), expected, atol=1e-6)


def test_numbers_of_a_small_range_keep_their_digits(
    exported: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tiny(*_: object) -> Predictor:
        return lambda pixels: np.full((len(pixels), 1), 1.2345e-6, np.float32)

    done, folder = exported("regression", "global")
    monkeypatch.setattr(predict_module, "predictor", tiny)
    assert table(folder, done, tmp_path, "onnx")[1] == ["some.npz#0", "1.2345e-06"]


def test_a_finding_called_path_has_another_heading_than_the_images_path(exported: Folders, tmp_path: Path) -> None:
    done, _ = exported("multi-label", "global")
    (tmp_path / "names.txt").write_text("path\n=cmd|x\na,b\n", encoding="utf-8")
    model, names = tmp_path / "model", tmp_path / "names.txt"
    export(ExportRequest(done.run, "global", model, "onnx", state=done.state, classes=names))
    assert table(model, done, tmp_path, "onnx")[0] == ["path", "path (output)", "'=cmd|x", "a,b"]


def test_a_task_of_another_package_is_imported_only_if_it_is_allowed(exported: Folders, tmp_path: Path) -> None:
    done, folder = exported("own", "global")
    with pytest.raises(ConfigError, match=f"the model needs the code {OWN}.*--allow-plugin {OWN}"):
        table(folder, done, tmp_path, "torch")
    assert len(table(folder, done, tmp_path, "onnx")) == 8


def test_a_model_of_an_unknown_task_is_refused(exported: Folders, tmp_path: Path) -> None:
    done, folder = exported("regression", "global")
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    contents = model_folder.read(copy)
    named = contents.model.task.model_copy(update={"name": "regresion"})
    facts = contents.facts.model_copy(update={"model": contents.model.model_copy(update={"task": named})})
    data = save(load((copy / WEIGHTS).read_bytes()), facts.strings())
    model_folder.write(copy, facts, {WEIGHTS: data}, "")
    assert isinstance(model_folder.read(copy), ModelContents)
    assert codec.digest(data) == model_folder.read(copy).files[WEIGHTS]
    assert GRAPH not in model_folder.read(copy).files
    with pytest.raises(ConfigError, match="did you mean 'regression'"):
        table(copy, done, tmp_path, "torch")


def test_one_output_without_a_name_is_the_prediction(tmp_path: Path) -> None:
    run = task_recipe("regression", rounds=1, class_names=(), model={"name": "mlp", "hidden": [4]})
    done = finished_run(run.model_dump_json())
    made = export(ExportRequest(done.run, "global", tmp_path / "m", "onnx", state=done.state))
    assert made.facts.model.classes == ("prediction",)
