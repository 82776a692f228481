"""Images in, a table out: right classes, unreadable files named, and nothing but the exported folder believed."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load, save
from tests.support.command_line import called
from tests.support.finished_runs import FinishedRun, finished_run
from tests.support.image_files import dicom

from protofed.client.data.decoding import decode, in_unit
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.config.tables import Input
from protofed.common.errors import ConfigError, DataError, OutOfSpaceError
from protofed.deploy.export import model_folder
from protofed.deploy.export.export import ExportRequest, export
from protofed.deploy.export.images import ImageSource, read_images
from protofed.deploy.export.model_folder import FACTS, GRAPH, WEIGHTS
from protofed.deploy.export.predict import Predicted, PredictRequest, predict

SHAPE = (1, 8, 8)
INPUT = Input(shape=SHAPE)
WITHOUT = """
import sys
for absent in ("torch", "torchvision", "onnx", "onnxscript", "sklearn", "matplotlib"):
    sys.modules[absent] = None
from protofed.deploy.cli import main as cli
cli.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def done(recipe_of: Callable[..., Recipe]) -> FinishedRun:
    recipe = recipe_of("fednh", rounds=2, model={"name": "mlp", "hidden": [16]})
    return finished_run(recipe.model_copy(update={"name": "predicting"}).model_dump_json())


@pytest.fixture(scope="module")
def exported(done: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both formats; no test may change it."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(ExportRequest(done.run, "global", folder, state=done.state))
    return folder


@pytest.fixture
def model(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "model"))


@pytest.fixture(scope="module")
def pngs(done: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test set as files, by class; grey values to 16 bits, so that they are the run's own."""
    folder = tmp_path_factory.mktemp("pngs")
    for index, (image, label) in enumerate(zip(done.test.pixels(), done.test.labels, strict=True)):
        (folder / str(int(label))).mkdir(exist_ok=True)
        grey = (image[0].numpy() * 65535).round().astype(np.uint16)
        Image.fromarray(grey).save(folder / str(int(label)) / f"{index:04d}.png")
    return folder


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def asked(
    model: Path, images: Path, tmp_path: Path, series: bool = False, tile_size: int | None = None, **changes: Any
) -> Predicted:
    return predict(PredictRequest(model, ImageSource(images, series, tile_size), tmp_path / "p.csv", **changes))


@pytest.mark.parametrize("runtime", ["torch", "onnx"])
def test_files_are_classified_as_the_run_did(
    runtime: Any, exported: Path, pngs: Path, done: FinishedRun, tmp_path: Path
) -> None:
    found = asked(exported, pngs, tmp_path, runtime=runtime, batch=50)
    rows = table(tmp_path / "p.csv")
    assert (found.runtime, found.image_count, found.unreadable) == (runtime, len(done.test), [])
    right = sum(row["class"] == row["path"].partition("/")[0] for row in rows)
    assert right / len(rows) == pytest.approx(done.scores["evaluator"]["global.accuracy"], abs=1e-9)
    for row in rows[:20]:
        every = [float(row[f"p_{c}"]) for c in range(10)]
        assert sum(every) == pytest.approx(1, abs=1e-5)
        assert (int(row["class"]), float(row["probability"])) == (int(np.argmax(every)), max(every))
        assert row["name"] == row["class"]


def test_an_archive_is_classified_like_files(exported: Path, done: FinishedRun, tmp_path: Path) -> None:
    np.savez(tmp_path / "some.npz", images=done.test.pixels()[:30, 0].numpy())
    found = asked(exported, tmp_path / "some.npz", tmp_path)
    rows = table(tmp_path / "p.csv")
    assert (found.image_count, rows[0]["path"], rows[29]["path"]) == (30, "some.npz#0", "some.npz#29")


@pytest.mark.parametrize(
    "arrays", [{"labels": np.zeros(3)}, {"images": np.zeros((2, 8))}, {"images": np.zeros((0, 8, 8))}]
)
def test_an_archive_without_images_is_refused(arrays: dict[str, Any], exported: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "some.npz", **arrays)
    with pytest.raises(DataError, match="expected"):
        asked(exported, tmp_path / "some.npz", tmp_path)


def with_input(model: Path, **changes: Any) -> None:
    """The exported model as of a run whose `[input]` was changed: only its weights stay."""
    edit(model, lambda c: c["model"]["input"].update(changes))
    edit(model, lambda c: c["files"].pop(GRAPH, None))
    data = save(load((model / WEIGHTS).read_bytes()), model_folder.read(model).facts.strings())
    (model / WEIGHTS).write_bytes(data)
    edit(model, lambda c: c["files"].update({WEIGHTS: codec.digest(data)}))


@pytest.mark.parametrize(
    ("frames", "wanted"),
    [("all", [1, 2, 3, 4, 5, 6]), ({"every": 2}, [1, 3, 5]), ("middle", [4])],
    ids=str,
)
def test_each_frame_of_a_series_has_the_row_that_it_would_have_alone(
    frames: Any, wanted: list[int], model: Path, done: FinishedRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the command: a folder with a series in it, whose files are not in the order of its slices."""
    stack = np.rint(done.test.pixels()[:6, 0].numpy() * 255).astype(np.uint8)
    for folder in ("scan", "alone"):
        (tmp_path / folder / "ct").mkdir(parents=True)
        for z, plane in enumerate(stack):
            name = str(6 - z) if folder == "scan" else f"{z + 1}.dcm"
            dicom(tmp_path / folder / "ct" / name, plane, 8, InstanceNumber=z)
    with_input(model, frames=frames)
    by_name = ("predict", model, tmp_path / "alone", "--out", tmp_path / "alone.csv")
    assert called(capfd, *by_name)[0] == 0
    alone = {row.pop("path"): row for row in table(tmp_path / "alone.csv")}
    code, out, err = called(
        capfd, "predict", model, tmp_path / "scan", "--series", "folder", "--out", tmp_path / "p.csv"
    )
    assert (code, f"{len(wanted)} images by torch, 0 unreadable" in out) == (0, True), err
    rows = table(tmp_path / "p.csv")
    frame = "ct, frame {}" if frames != "middle" else "ct"
    assert [row.pop("path") for row in rows] == [frame.format(number) for number in wanted]
    assert rows == [alone[f"ct/{number}.dcm"] for number in wanted]
    assert len({row["p_0"] for row in alone.values()}) == 6, "no two slices alike"


def test_tiles_are_classified_by_a_list(
    model: Path, done: FinishedRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stack = np.rint(done.test.pixels()[:2, 0].numpy() * 255).astype(np.uint8)
    Image.fromarray(np.concatenate(stack, axis=1)).save(tmp_path / "slide.png")
    Image.fromarray(stack[1]).save(tmp_path / "alone.png")
    (tmp_path / "new.csv").write_text("path,x,y\nslide.png,8,0\nslide.png,9,0\n", encoding="utf-8")
    command = ("predict", model, tmp_path / "new.csv", "--tile-size", "8", "--out", tmp_path / "p.csv")
    code, _, err = called(capfd, *command)
    assert code == 65
    assert "unreadable: slide.png, tile 9,0,8,8: a tile that crosses the edge of its image of 16 x 8 pixels" in err
    (row,) = table(tmp_path / "p.csv")
    assert row.pop("path") == "slide.png, tile 8,0,8,8"
    asked(model, tmp_path / "alone.png", tmp_path)
    (alone,) = table(tmp_path / "p.csv")
    assert alone.pop("path") == "alone.png"
    assert row == alone
    assert called(capfd, *command[:2], tmp_path, *command[3:])[0] == 78, "a folder has no tiles"


def test_unreadable_files_are_named_when_the_others_are_done(
    exported: Path, pngs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(pngs / "5", tmp_path / "images" / "5")).parent
    (folder / "broken.png").write_bytes(b"no image")
    whole = sorted((folder / "5").glob("*.png"))
    (folder / "half.png").write_bytes(whole[0].read_bytes()[:60])
    (folder / "notes.txt").write_text("no image, and not taken for one", encoding="utf-8")
    command = ("predict", exported, folder, "--out", tmp_path / "p.csv")
    for more, wanted in (([], 65), (["--skip-unreadable"], 0)):
        code, out, err = called(capfd, *command, *more)
        assert code == wanted, err
        assert f"{len(whole)} images by onnx, 2 unreadable" in out
        assert "unreadable: broken.png" in err
        assert "unreadable: half.png" in err
        assert len(table(tmp_path / "p.csv")) == len(whole)
    told = json.loads(called(capfd, *command, "--json", "--skip-unreadable")[1])
    assert [one["path"] for one in told["unreadable"]] == ["broken.png", "half.png"]


def test_a_full_disk_is_told_and_leaves_no_half_table(
    exported: Path, pngs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutOfSpaceError):
        asked(exported, pngs, tmp_path)
    assert not list(tmp_path.glob("p.csv*"))


def test_without_images_gpu_or_pillow_there_is_no_table(
    exported: Path, tmp_path: Path, pngs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no images"):
        asked(exported, tmp_path / "empty", tmp_path)
    with pytest.raises(DataError, match="there is no file or folder"):
        asked(exported, tmp_path / "nowhere", tmp_path)
    assert not list(tmp_path.glob("p.csv*"))
    with pytest.raises(ConfigError, match="GPU"):
        asked(exported, pngs, tmp_path, runtime="onnx", device="cuda:63")
    with pytest.raises(ConfigError, match="expected auto, cpu, cuda"):
        asked(exported, pngs, tmp_path, device="gpu")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"\.whl\[export\]'"):
        asked(exported, pngs, tmp_path)


def test_images_are_prepared_as_the_runs_sites_prepare_theirs(tmp_path: Path) -> None:
    picture = np.linspace(0, 255, 20 * 10 * 3).reshape(10, 20, 3).astype(np.uint8)
    Image.fromarray(picture).save(tmp_path / "one.png")
    Image.fromarray(picture[..., 0].astype(np.uint16) * 257).save(tmp_path / "two.tif")
    for fit in ("pad", "crop", "stretch"):
        input_ = Input(shape=(1, 8, 8), fit=fit, colours="convert", window=(100, 200))
        images = read_images(ImageSource(tmp_path), input_)
        for number, name in enumerate(("one.png", "two.tif")):
            expected = decode(tmp_path / name, input_)
            np.testing.assert_array_equal(images.read(number), in_unit(expected))
            assert expected.dtype == np.uint16


def test_a_run_of_one_size_and_colour_takes_others_stretched_and_converted(tmp_path: Path) -> None:
    Image.new("RGB", (20, 10), (255, 0, 0)).save(tmp_path / "red.png")
    found = read_images(ImageSource(tmp_path), INPUT).read(0)
    assert (found.shape, found.dtype.name) == (SHAPE, "float32")
    np.testing.assert_allclose(found, 76 / 255, atol=1e-6)


def test_an_array_of_another_size_becomes_what_a_file_would(tmp_path: Path) -> None:
    eight = np.arange(200, dtype=np.uint8).reshape(1, 10, 20)
    Image.fromarray(eight[0]).save(tmp_path / "one.png")
    expected = read_images(ImageSource(tmp_path), INPUT).read(0)
    for array, apart in ((eight, 1e-6), (eight.astype(np.uint16) * 257, 4e-3), (eight / 255, 4e-3)):
        np.savez(tmp_path / "one.npz", images=array)
        np.testing.assert_allclose(read_images(ImageSource(tmp_path / "one.npz"), INPUT).read(0), expected, atol=apart)


def test_dicom_is_known_by_its_content(tmp_path: Path) -> None:
    dicom(tmp_path / "IM0001", np.arange(64, dtype=np.uint16).reshape(8, 8))
    images = read_images(ImageSource(tmp_path), INPUT)
    assert [images.name(i) for i in range(len(images))] == ["IM0001"]
    np.testing.assert_array_equal(images.read(0), in_unit(decode(tmp_path / "IM0001", INPUT)))


def test_hidden_files_are_left_out_and_all_levels_are_read(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/b/one.PNG", "two.tif", "three.bmp", "four.jpeg", ".five.png"):
        Image.new("L", (8, 8)).save(tmp_path / name)
    images = read_images(ImageSource(tmp_path), INPUT)
    assert [images.name(i) for i in range(len(images))] == ["a/b/one.PNG", "four.jpeg", "three.bmp", "two.tif"]
    with pytest.raises(ConfigError, match="5 channels"):
        read_images(ImageSource(tmp_path), Input(shape=(5, 8, 8)))


def edit(model: Path, change: Callable[[dict[str, Any]], object]) -> None:
    contents = json.loads((model / FACTS).read_text(encoding="utf-8"))
    change(contents)
    (model / FACTS).write_text(json.dumps(contents), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (lambda c: c.update(format="other"), "not a protofed model"),
        (lambda c: c.update(format_version=1), "format_version 1; this protofed reads 2"),
        (lambda c: c.update(surprise=1), "unknown key 'surprise'"),
        (lambda c: c["model"].update(head="other"), "head"),
        (lambda c: c["model"].update(classes=["a", "b"]), "differ in 'model'"),
        (lambda c: c["origin"].update(run="another"), "differ in 'origin'"),
        (lambda c: c["files"].update({WEIGHTS: "0" * 64}), "its digest differs"),
        (lambda c: c["files"].pop(WEIGHTS), "without model.safetensors"),
    ],
)
def test_facts_that_were_changed_are_noticed(
    change: Callable[[dict[str, Any]], object], phrase: str, model: Path, pngs: Path, tmp_path: Path
) -> None:
    edit(model, change)
    with pytest.raises(DataError, match=phrase):
        asked(model, pngs, tmp_path, runtime="torch")


@pytest.mark.parametrize(("name", "runtime"), [(WEIGHTS, "torch"), (GRAPH, "onnx")])
def test_a_damaged_file_is_noticed(name: str, runtime: Any, model: Path, pngs: Path, tmp_path: Path) -> None:
    data = bytearray((model / name).read_bytes())
    data[len(data) // 2] ^= 1
    (model / name).write_bytes(data)
    with pytest.raises(DataError, match="is not what was exported"):
        asked(model, pngs, tmp_path, runtime=runtime)


def test_weights_that_were_put_in_place_are_noticed(model: Path, pngs: Path, tmp_path: Path) -> None:
    """Also by somebody who corrects the file's digest."""
    facts = model_folder.read(model).facts
    other = {name: np.asarray(array + 1) for name, array in load((model / WEIGHTS).read_bytes()).items()}
    data = save(other, facts.strings())
    (model / WEIGHTS).write_bytes(data)
    edit(model, lambda c: c["files"].update({WEIGHTS: codec.digest(data)}))
    with pytest.raises(DataError, match="does not hold the weights"):
        asked(model, pngs, tmp_path, runtime="torch")


def test_a_graph_of_another_model_is_noticed(model: Path, pngs: Path, tmp_path: Path) -> None:
    import onnx

    proto = onnx.load(model / GRAPH)
    onnx.helper.set_model_props(proto, {})
    (model / GRAPH).write_bytes(data := proto.SerializeToString())
    edit(model, lambda c: c["files"].update({GRAPH: codec.digest(data)}))
    with pytest.raises(DataError, match="differ in"):
        asked(model, pngs, tmp_path, runtime="onnx")


def test_a_folder_that_is_no_model_is_named(pngs: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="`protofed export` wrote"):
        asked(tmp_path, pngs, tmp_path)
    (tmp_path / FACTS).write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="it is not JSON"):
        asked(tmp_path, pngs, tmp_path)


def test_code_that_is_not_ours_is_never_run_unasked(model: Path, pngs: Path, tmp_path: Path) -> None:
    edit(model, lambda c: c["model"]["architecture"].update(name="evil_models:make"))
    contents = model_folder.read(model)
    data = save(load((model / WEIGHTS).read_bytes()), contents.facts.strings())
    (model / WEIGHTS).write_bytes(data)
    edit(model, lambda c: c["files"].update({WEIGHTS: codec.digest(data)}))
    with pytest.raises(ConfigError, match=r"--allow-plugin.*evil_models"):
        asked(model, pngs, tmp_path, runtime="torch")
    with pytest.raises(ConfigError, match="'evil_models' cannot be imported"):
        asked(model, pngs, tmp_path, runtime="torch", allowed=frozenset({"evil_models:make"}))


def test_onnx_runtime_is_enough(exported: Path, pngs: Path, tmp_path: Path) -> None:
    words = ["predict", str(exported), str(pngs / "1"), "--out", str(tmp_path / "p.csv")]
    command = [sys.executable, "-c", WITHOUT, *words]
    by_itself = subprocess.run(command, capture_output=True, text=True, check=False)
    assert by_itself.returncode == 0, by_itself.stderr
    assert " images by onnx, 0 unreadable" in by_itself.stdout
    assert table(tmp_path / "p.csv")
    refused = subprocess.run([*command, "--runtime", "torch"], capture_output=True, text=True, check=False)
    assert refused.returncode == 78
    assert ".whl[client]'" in refused.stderr


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_its_remedy(
    package: str, done: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    real = importlib.import_module

    def without(name: str, *more: Any) -> Any:
        if name == package:
            raise ModuleNotFoundError(name=name)
        return real(name, *more)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ConfigError, match=rf"{package} is not installed.*\.whl\[export\]'"):
        export(ExportRequest(done.run, "global", tmp_path / "m", "onnx", state=done.state))
    assert not (tmp_path / "m").exists()
