"""What a site is told of its own data, by the command that it types; all of it made by hand here."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from protofed.common.config.recipe import Recipe, read_recipe
from protofed.deploy.cli import client_check, main
from protofed.deploy.site.contact_sheet import sheet
from protofed.deploy.site.survey import Survey, SurveyedImage

RECIPE = """\
name = "skin"
rounds = 1
classes = 3
class_names = ["benign", "malignant", "naevus"]
input = { shape = [3, 4, 4], fit = "stretch", std = [0.2] }
method = { name = "fednh" }
model = { name = "mlp" }
"""
POLICY = """\
methods = ["fednh"]
parts = ["body", "head"]
[limits]
models = ["mlp"]
batches = [1, 64]
sides = [1, 64]
"""
SETTINGS = """\
[data]
source = "folder"
root = "{root}"
label_map = {{ "Nevi" = "naevus" }}
ignore_labels = ["unsure"]
"""
Check = Callable[..., tuple[int, dict[str, Any]]]
Run = Callable[..., tuple[int, str]]


def image(path: Path, seed: int, size: tuple[int, int] = (8, 6), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
    Image.fromarray(array).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five images for training of three classes, one of them ignored; two to test on."""
    root = tmp_path / "images"
    for number, name in enumerate(("benign/a", "benign/b", "malignant/c", "Nevi/d", "Nevi/e", "unsure/f")):
        image(root / "train" / f"{name}.png", number)
    for number, name in enumerate(("benign/g", "malignant/h")):
        image(root / "test" / f"{name}.png", 10 + number, (9, 9))
    return root


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    return read_recipe(tmp_path / "recipe.toml")


@pytest.fixture
def run(
    tmp_path: Path, folder: Path, recipe: Recipe, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Type the command on a terminal of 100 columns; its exit code and what it prints, errors too."""
    monkeypatch.setattr(client_check.console, "width", 100)

    def act(*more: str | Path, settings: str = "", recipe: bool = True) -> tuple[int, str]:
        file = tmp_path / "site.toml"
        file.write_text(settings or SETTINGS.format(root=folder), encoding="utf-8")
        named = [str(tmp_path / "recipe.toml")] if recipe else []
        with pytest.raises(SystemExit) as ended:
            main.main(["client", "check", *named, "--settings", str(file), *map(str, more)])
        return int(ended.value.code or 0), "".join(capfd.readouterr())

    return act


@pytest.fixture
def check(run: Run) -> Check:
    def act(*more: str | Path, **changes: Any) -> tuple[int, dict[str, Any]]:
        code, out = run("--json", *more, **changes)
        return code, json.loads(out)

    return act


def test_data_that_fit_are_counted_by_class_and_split_and_nothing_is_written(
    check: Check, recipe: Recipe, folder: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, found = check()
    assert (code, found["refusal"]) == (0, None)
    assert found["stored"] == {"train": [2, 1, 2], "test": [1, 1, 0]}
    assert found["taken"] == {"trains_on": [2, 1, 2], "tests_on": [1, 1, 0]}
    assert found["not_scored"] == {"test_set": ["naevus"]}
    assert found["ignored"] == {"unsure": 1}
    assert found["unmapped"] == {}
    assert found["sizes"] == {"8 x 6": 5, "9 x 9": 2}
    assert found["formats"] == {"PNG, RGB, 8 bits": 7}
    assert found["preprocessing_digest"] == recipe.preprocessing_digest()
    assert sorted(tmp_path.rglob("*")) == sorted({*before, tmp_path / "site.toml"})


def test_what_would_leave_is_shown_for_the_examples_that_were_counted(
    check: Check, run: Run, folder: Path, tmp_path: Path
) -> None:
    code, found = check("--preview", "--set", "plan.batch_size=2")
    assert (code, found["preview"]["refusals"]) == (0, [])
    assert "prototypes" in {row["part"] for row in found["preview"]["leaves"]}
    assert "3 steps an epoch on 5 examples here" in str(found["preview"]["asked"])
    (tmp_path / "policy.toml").write_text(POLICY, encoding="utf-8")
    narrow = ("--preview", "--policy", tmp_path / "policy.toml", "--set", "plan.batch_size=2")
    code, found = check(*narrow)
    assert (code, "prototypes" in found["refusal"]) == (77, True)
    assert any("prototypes" in why for why in found["preview"]["refusals"])
    assert "min_contrast" in {row["key"] for row in found["preview"]["limits"]}, "of the images that were read"
    assert not [said for said in found["preview"]["still_open"] if "the site's images" in said]
    assert check()[1].keys() == found.keys() - {"preview"}
    image(folder / "train" / "Benign skin" / "x.png", 20)
    code, found = check("--preview", "--set", "plan.batch_size=2")
    assert (code, "examples here" in str(found["preview"]["asked"])) == (65, False), "nothing was counted"
    assert run("--preview", recipe=False)[0] == 78


def test_a_site_that_would_spoil_each_round_is_told_and_ends_with_the_policys_code(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    """With secure aggregation a site does not decline for its images: it would send random numbers."""
    text = POLICY.replace("parts = [", 'sum_group = 3\nparts = ["prototypes", ')
    (tmp_path / "policy.toml").write_text(text, encoding="utf-8")
    secure = ("--set", "federation.secure=true", "--set", "federation.min_sites=3", "--set", "plan.batch_size=2")
    code, out = run("--policy", tmp_path / "policy.toml", *secure)
    shown = " ".join(out.split())
    assert (code, "spoils each round" in shown, "(limits.min_step_sum)" in shown) == (77, True, True), out


def test_rare_classes_of_a_drawn_test_set_are_named(check: Check, run: Run, tmp_path: Path) -> None:
    root = tmp_path / "drawn"
    for number in range(31):
        name = "benign" if number < 20 else "malignant" if number < 30 else "naevus"
        image(root / name / f"{number}.png", number)
    settings = SETTINGS.format(root=root) + "test_fraction = 0.3\nlocal_test_fraction = 0.25\n"
    code, found = check(settings=settings)
    assert (code, found["taken"]["tests_on"]) == (93, [6, 5, 0])
    assert found["taken"]["own_test_set"] == [5, 0, 0]
    assert ["own test set has one class alone, benign" in text for text in found["but"]] == [True]
    assert found["not_scored"] == {"test_set": ["naevus"], "own_test_set": ["malignant", "naevus"]}
    shown = run(settings=settings)[1]
    assert "test set has no image of them: naevus" in shown
    assert "own test set has no image of them: malignant, naevus" in " ".join(shown.split())


def test_all_that_is_wrong_is_told_at_once_and_the_daemon_would_refuse(check: Check, folder: Path) -> None:
    image(folder / "train" / "Benign skin" / "x.png", 20)
    (folder / "train" / "benign" / "broken.png").write_bytes(b"")
    image(folder / "train" / "benign" / "grey.png", 21, mode="L")
    code, found = check()
    assert code == 65
    assert "'Benign skin'" in found["refusal"]
    assert found["unmapped"] == {"Benign skin": {"images": 1, "nearest": "benign"}}
    assert [one["file"] for one in found["unreadable"]] == ["train/benign/broken.png", "train/benign/grey.png"]
    assert found["unreadable"][0]["why"] == "empty"
    assert "input.colours" in found["unreadable"][1]["why"]
    assert found["formats"]["PNG, grey, 8 bits"] == 1
    assert found["stored"]["train"] == [2, 1, 2]
    assert found["taken"] == {}


def test_the_verdict_comes_first_and_names_what_makes_scores_untrue(run: Run, check: Check, folder: Path) -> None:
    code, out = run()
    assert code == 0
    assert "The daemon would take part in skin with these data.\n" in out
    image(folder / "train" / "malignant" / "b-again.png", 1)  # as benign/b
    image(folder / "test" / "malignant" / "c-again.png", 2)  # as malignant/c
    code, found = check()
    assert (code, found["refusal"], found["scores_untrue"]) == (93, None, True)
    assert found["alike"] == [
        ["train/benign/b.png (benign, train)", "train/malignant/b-again.png (malignant, train)"],
        ["test/malignant/c-again.png (malignant, test)", "train/malignant/c.png (malignant, train)"],
    ]
    assert (found["alike_with_several_labels"], found["test_images_trained_on"]) == (1, 1)
    assert found["but"] == [
        "test images that are also trained on: 1; with them scores are too good: remove them on one side",
        "images that occur under several labels: 1; no model can be right on all of them: correct the labels",
    ]
    code, out = run()
    said = " ".join(out.split())
    assert code == 93
    assert said.index("would take part in skin with these data, but:") < said.index("also trained on")
    assert said.index("that occur under several labels") < said.index("Classes")


def test_files_that_are_left_out_are_named_by_the_verdict(check: Check, folder: Path) -> None:
    (folder / "train" / "benign" / "broken.png").write_bytes(b"")
    code, found = check(settings=SETTINGS.format(root=folder) + "max_unreadable_fraction = 0.5\n")
    assert (code, found["refusal"], found["but"]) == (0, None, ["images that cannot be used: 1; they are left out"])


def test_a_single_class_and_several_bit_depths_are_named_by_the_verdict(check: Check, tmp_path: Path) -> None:
    root = tmp_path / "single"
    for number in range(20):
        image(root / "benign" / f"{number}.png", number, mode="L")
    settings = SETTINGS.format(root=root)
    grey = ("--set", "input.shape=[1,4,4]")
    code, found = check(*grey, settings=settings)
    assert (code, len(found["but"])) == (93, 2)
    assert "all images to train on are of one class, benign" in found["but"]
    assert any("the test set has one class alone, benign" in text for text in found["but"])
    for number in range(20):
        image(root / "malignant" / f"{number}.png", 50 + number, mode="L")
    Image.fromarray(np.full((6, 8), 3000, np.uint16)).save(root / "malignant" / "deep.png")
    code, found = check(*grey, settings=settings)
    assert (code, found["scores_untrue"]) == (0, False), "several depths are said, and scores may be true"
    (text,) = found["but"]
    assert "several bit depths (40 with 8 bits, 1 with 16 bits)" in text


def test_what_is_left_out_by_its_name_is_listed_once(run: Run, check: Check, folder: Path) -> None:
    for place in ("train/benign", "train/malignant"):
        image(folder / place / "#recycle" / "old.png", 50)
        (folder / place / "readme.txt").write_text("about", encoding="utf-8")
    code, found = check()
    assert (code, found["unreadable"]) == (0, [])
    assert found["taken"]["trains_on"] == [2, 1, 2]
    assert len(found["left_out"]) == 4
    assert "as deleted: #recycle, readme.txt\n" in run()[1]


def test_a_pipe_is_named_and_does_not_hang_the_check(check: Check, folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "train" / "benign" / "pipe.png")
    code, found = check()
    assert code == 65
    assert found["unreadable"] == [{"file": "train/benign/pipe.png", "why": "no regular file"}]
    os.mkfifo(tmp_path / "list.csv")
    code, found = check(settings=f"[data]\nsource = 'manifest'\nroot = '{tmp_path / 'list.csv'}'\n")
    assert (code, "neither a folder nor a file" in found["refusal"]) == (65, True)


def test_groups_in_train_and_test_are_refused_and_their_names_not_told(run: Run, check: Check, folder: Path) -> None:
    for split, number in (("train", 30), ("test", 31)):
        image(folder / split / "benign" / f"SECRET7-{number}.png", number)
    grouped = SETTINGS.format(root=folder) + "group_pattern = '([A-Z]+[0-9])-'\n"
    code, found = check(settings=grouped)
    assert code == 65
    assert found["groups"] == 1
    assert found["crossing"] == ["test/benign/SECRET7-31.png", "train/benign/SECRET7-30.png"]
    assert len(found["ungrouped"]) == 7
    _, out = run(settings=grouped)
    assert "1 group\n" in out
    assert "2 images of groups in both train and test" in out


def test_another_preparation_than_the_pinned_one_is_refused_by_name(check: Check, recipe: Recipe, folder: Path) -> None:
    settings = SETTINGS.format(root=folder) + "preprocessing_digest = "
    assert check(settings=f"{settings}'{recipe.preprocessing_digest()}'")[0] == 0
    code, found = check(settings=f"{settings}'{'0' * 64}'")
    assert code == 65
    assert "correct data.preprocessing_digest" in found["refusal"]


def test_a_class_below_the_policys_threshold_is_said_to_be_absent(run: Run, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('methods = ["fednh"]\nparts = ["body"]\nmin_samples_per_class = 2\n', encoding="utf-8")
    code, out = run("--policy", policy)
    assert code == 77
    assert "The daemon would take no part" in out, "the policy does not allow prototypes"
    assert "count as absent: malignant." in " ".join(out.split())


def test_mean_and_std_are_those_of_the_pixels_and_far_ones_hinted_at(
    check: Check, folder: Path, tmp_path: Path
) -> None:
    _, found = check()
    names = sorted(folder.glob("train/*/*.png"))
    seen = [
        Image.open(name).resize((4, 4), Image.Resampling.BILINEAR) for name in names if name.parent.name != "unsure"
    ]
    pixels = np.stack([np.asarray(one) for one in seen]) / 255
    np.testing.assert_allclose(found["mean"], pixels.mean((0, 1, 2)), rtol=1e-9)
    np.testing.assert_allclose(found["std"], pixels.std((0, 1, 2)), rtol=1e-9)
    assert check()[1]["far_from_the_recipe"] == []
    narrow = RECIPE.replace("std = [0.2]", "std = [0.01]")
    (tmp_path / "recipe.toml").write_text(narrow, encoding="utf-8")
    code, found = check()
    assert code == 0, "a hint, no refusal"
    assert [line.partition(":")[0] for line in found["far_from_the_recipe"]] == ["channel 0", "channel 1", "channel 2"]
    (tmp_path / "recipe.toml").write_text(RECIPE.replace(", std = [0.2]", ""), encoding="utf-8")
    assert check()[1]["far_from_the_recipe"] == [], "a recipe that sets neither expects nothing"


def test_without_a_recipe_own_labels_count_and_for_an_evaluator_its_test_set(check: Check) -> None:
    code, found = check(recipe=False)
    assert (code, found["recipe"], found["preprocessing_digest"]) == (0, None, None)
    assert found["classes"] == ["benign", "malignant", "naevus"]
    assert found["stored"]["train"] == [2, 1, 2]
    code, found = check("--role", "evaluator")
    assert code == 0
    assert found["taken"] == {"tests_on": [1, 1, 0]}


def test_a_volume_that_needs_a_window_is_told_as_that_without_a_recipe(check: Check, run: Run, tmp_path: Path) -> None:
    """No recipe, no window; with one that has a window and a rule, each slice is an image."""
    values: NDArray[np.int16] = np.arange(-60, 60, dtype=np.int16).reshape(5, 4, 6)
    make: Any = nibabel.Nifti1Image
    for label, count in (("benign", 2), ("malignant", 1)):
        (tmp_path / "ct" / label).mkdir(parents=True)
        for number in range(count):
            make(values + number, np.eye(4)).to_filename(tmp_path / "ct" / label / f"{number}.nii.gz")
    settings = f'[data]\nsource = "folder"\nroot = "{tmp_path / "ct"}"\n'
    code, found = check(recipe=False, settings=settings)
    assert (code, found["refusal"], len(found["unreadable"])) == (0, None, 3)
    assert {image["why"].partition(";")[0] for image in found["unreadable"]} == {
        "values of 32 bits or with a sign, which need input.window"
    }
    assert (found["formats"], found["sizes"]) == ({"NIfTI, grey, 16 bits": 3}, {"5 x 4": 3})
    changes = ("--set", "input.window=[0, 120]", "--set", "input.frames='all'", "--set", "input.colours='convert'")
    code, found = check(*changes, settings=settings)
    assert (found["unreadable"], found["stored"]["all"]) == ([], [12, 6, 0])
    assert (found["formats"], found["sizes"], found["groups"]) == ({"NIfTI, grey, 16 bits": 18}, {"5 x 4": 18}, 3)
    assert "18 images with a label, 0 of them unreadable" in run(*changes, settings=settings)[1]


def test_data_that_are_not_there_are_a_refusal_and_no_table(check: Check, run: Run, tmp_path: Path) -> None:
    for root in ("nowhere", "recipe.toml"):
        code, found = check(settings=SETTINGS.format(root=tmp_path / root))
        assert (code, root in found["refusal"]) == (65, True)
        assert found["classes"] == ["benign", "malignant", "naevus"]
    lines = run(settings=SETTINGS.format(root=tmp_path / "nowhere"))[1].splitlines()
    assert [line for line in lines if line.isalpha()] == ["Verdict", "Preparation"]


def test_arrays_have_their_numbers_mapped_and_compared(check: Check, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (12, 4, 4, 3), np.uint8)
    images[11] = images[0]
    np.savez(
        tmp_path / "own.npz",
        train_images=images[:9],
        train_labels=np.array([1, 1, 2, 2, 3, 3, 9, 1, 2]),
        test_images=images[9:],
        test_labels=np.array([1, 2, 3]),
    )
    settings = f"[data]\nsource = 'npz'\nroot = '{tmp_path / 'own.npz'}'\nignore_labels = ['9']\n"
    code, found = check(settings=settings)
    assert code == 65, "numbers without a map are classes of that number, and the run has no class 3"
    mapped = settings + 'label_map = { "1" = "benign", "2" = "malignant", "3" = "naevus" }\n'
    code, found = check(settings=mapped)
    assert (code, found["refusal"]) == (93, None)
    assert found["stored"] == {"train": [3, 3, 2], "test": [1, 1, 1]}
    assert found["ignored"] == {"9": 1}
    assert found["alike"] == [["train 0 (1, train)", "test 2 (3, test)"]]
    assert found["test_images_trained_on"] == 1


def test_a_contact_sheet_is_written_for_this_user_alone_where_it_can_be(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "sheet.png"
    before = os.umask(0)
    try:
        code, out = run("--contact-sheet", file)
    finally:
        os.umask(before)
    assert code == 0, out
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with Image.open(file) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 300
    code, out = run("--contact-sheet", tmp_path / "nowhere" / "sheet.png")
    assert code == 74
    assert out.startswith("protofed: cannot write")
    assert len(out.splitlines()) == 1


def test_the_sheet_has_every_pixel_as_the_model_sees_it(run: Run, folder: Path, tmp_path: Path) -> None:
    colours = {"benign": (200, 10, 10), "malignant": (10, 200, 10), "Nevi": (10, 10, 200)}
    for file in folder.glob("*/*/*.png"):
        Image.new("RGB", (8, 6), colours.get(file.parent.name)).save(file)
    assert run("--contact-sheet", tmp_path / "sheet.png")[0] == 93, "the images of a class are equal"
    with Image.open(tmp_path / "sheet.png") as picture:
        counted = {colour: count for count, colour in picture.getcolors(1 << 24) or ()}
    each = {
        colour: counted[colour] / 128**2 for colour in colours.values()
    }  # images of 4 x 4 pixels, 32 times as large
    assert list(each.values()) == [3, 2, 2]


@pytest.mark.parametrize("classes", [2, 100])
def test_sheets_of_few_and_of_many_classes_are_wide_and_not_too_large(classes: int) -> None:
    pixels = np.zeros((3, 32, 32), np.uint8)
    seen = [SurveyedImage(f"{place}.png", "own", place % classes, "train") for place in range(10 * classes)]
    made = sheet(Survey(seen, Counter(), Counter(), lambda _: pixels), [f"class {c}" for c in range(classes)], "all")
    with Image.open(BytesIO(made)) as picture:
        assert picture.width > picture.height
        assert picture.width < 3000
