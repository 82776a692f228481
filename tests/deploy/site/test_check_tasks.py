"""`client check` of labels that are no classes: tables in the form of NIH ChestX-ray14 and CheXpert, and ages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.command_line import called

FINDINGS = ["Cardiomegaly", "Edema", "Effusion"]
RECIPE = """\
name = "chest"
rounds = 1
classes = {classes}
class_names = {names}
task = {task}
input = {{ shape = [1, 8, 8] }}
method = {{ name = "fedavg" }}
model = {{ name = "mlp" }}
"""
NIH = """\
[data]
source = "manifest"
root = "{root}/Data_Entry_2017_v2020.csv"
path_column = "Image Index"
label_column = "Finding Labels"
group_column = "Patient ID"
ignore_labels = ["No Finding", "Hernia"]
test_fraction = 0.25
"""
CHEXPERT = """\
[data]
source = "manifest"
root = "{root}/train.csv"
path_column = "Path"
label_column = ["Cardiomegaly", "Edema", "Pleural Effusion"]
group_pattern = '(patient[0-9]+)'
label_map = {{ "Pleural Effusion" = "Effusion" }}
test_fraction = 0.25
"""
# Of 24 patients with two images each: 8 have Cardiomegaly, 12 Effusion (4 of them both), 8 nothing that is asked for.
SETS = ["Cardiomegaly", "Cardiomegaly|Effusion", "Effusion|Hernia", "Effusion", "No Finding", "Hernia"]
# CheXpert's columns: Enlarged Cardiomediastinum (not asked for), Cardiomegaly, Edema, Pleural Effusion.
ROWS = [",1.0,0.0,", "-1.0,0.0,-1.0,1.0", ",,1.0,0.0", "1.0,1.0,1.0,1.0"]
Checked = Callable[..., tuple[int, dict[str, Any], str]]


def image(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (8, 8), np.uint8)).save(path)


@pytest.fixture
def nih(tmp_path: Path) -> Path:
    """The table as it is published: a blank heading at its end, commas in two headings' brackets."""
    heading = "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position"
    lines = [f"{heading},OriginalImage[Width,Height],OriginalImagePixelSpacing[x,y],"]
    for patient in range(24):
        for visit in range(2):
            name = f"{patient:08d}_{visit:03d}.png"
            image(tmp_path / "images_001" / "images" / name, 2 * patient + visit)
            whose = f"{patient},{20 + patient},{'MF'[patient % 2]},PA"
            lines.append(f"{name},{SETS[patient % 6]},{visit},{whose},2682,2749,0.143,0.143,")
    (tmp_path / "Data_Entry_2017_v2020.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def chexpert(tmp_path: Path) -> Path:
    columns = "Enlarged Cardiomediastinum,Cardiomegaly,Edema,Pleural Effusion"
    lines = [f"Path,Sex,Age,Frontal/Lateral,AP/PA,{columns}"]
    for patient in range(24):
        for view in ("view1_frontal", "view2_lateral"):
            path = f"CheXpert-v1.0-small/train/patient{patient:05d}/study1/{view}.png"
            image(tmp_path / path, len(lines))
            lines.append(f"{path},Female,68,{'Frontal,AP' if 'frontal' in view else 'Lateral,'},{ROWS[patient % 4]}")
    (tmp_path / "train.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def checked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Checked:
    """Exit code, result and text of the command."""

    def act(settings: str, task: str, names: Sequence[str] = FINDINGS) -> tuple[int, dict[str, Any], str]:
        recipe, site = tmp_path / "recipe.toml", tmp_path / "site.toml"
        recipe.write_text(RECIPE.format(classes=len(names), names=json.dumps(names), task=task), encoding="utf-8")
        site.write_text(settings.format(root=tmp_path), encoding="utf-8")
        code, plain, _ = called(capfd, "client", "check", recipe, "--settings", site, "--json")
        _, text, _ = called(capfd, "client", "check", recipe, "--settings", site)
        return code, json.loads(plain), " ".join(text.split())

    return act


@pytest.mark.usefixtures("nih")
def test_names_with_strokes_between_them_are_sets_of_findings(checked: Checked) -> None:
    code, found, text = checked(NIH, '{ name = "multi-label" }')
    assert (code, found["refusal"]) == (0, None)
    assert found["classes"] == FINDINGS
    assert found["stored"] == {"all": [16, 0, 24]}
    taken, images = found["taken"], found["images"]
    assert [one + other for one, other in zip(taken["trains_on"], taken["tests_on"], strict=True)] == [16, 0, 24]
    assert images["trains_on"] + images["tests_on"] == 48
    assert min(images.values()) > 0
    assert found["groups"] == 24
    assert found["crossing"] == []
    assert "1 x 8 x 8 [channels" in text
    assert "3 findings, images loaded" in text
    assert "│ all images │ 48 │" in text
    assert "own labels" not in text
    assert "A class with fewer" not in text


@pytest.mark.usefixtures("nih")
def test_a_finding_that_the_settings_forget_is_named(checked: Checked) -> None:
    code, found, text = checked(NIH.replace(', "Hernia"', ""), '{ name = "multi-label" }')
    assert code == 65
    assert set(found["unmapped"]) == {"Hernia"}
    assert "labels that the run cannot use: 'Hernia'. Say in data.label_map what each name is" in text


@pytest.mark.usefixtures("chexpert")
@pytest.mark.parametrize(
    ("uncertain", "blank", "counts"),
    [("ignore", "zeros", [24, 24, 24]), ("ones", "ones", [36, 36, 36]), ("zeros", "ignore", [24, 24, 24])],
)
def test_uncertain_and_blank_findings_count_as_the_recipe_says(
    checked: Checked, uncertain: str, blank: str, counts: list[int]
) -> None:
    code, found, _ = checked(CHEXPERT, f'{{ name = "multi-label", uncertain = "{uncertain}", blank = "{blank}" }}')
    assert (code, found["refusal"]) == (0, None)
    assert found["stored"] == {"all": counts}
    assert found["groups"] == 24


@pytest.mark.usefixtures("chexpert")
def test_uncertain_and_blank_findings_without_a_rule_are_refused_and_whom_to_ask_is_said(checked: Checked) -> None:
    code, found, text = checked(CHEXPERT, '{ name = "multi-label" }')
    assert code == 65
    assert found["unmapped"]["-1 in column Edema (the recipe has no task.uncertain)"]["images"] == 12
    assert "must say what -1 and blanks count as: ask the coordinator" in text
    assert "Say in data.label_map" not in text


@pytest.mark.usefixtures("nih")
def test_the_preview_is_of_the_number_of_images_not_of_findings(
    checked: Checked, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    images = checked(NIH, '{ name = "multi-label" }')[1]["images"]["trains_on"]
    command = ("client", "check", tmp_path / "recipe.toml", "--settings", tmp_path / "site.toml", "--preview", "--json")
    assert f"on {images} examples here" in called(capfd, *command)[1]


@pytest.mark.usefixtures("chexpert")
def test_one_column_of_one_finding_is_enough(checked: Checked) -> None:
    columns = '"Cardiomegaly", "Edema", "Pleural Effusion"'
    settings = CHEXPERT.replace(columns, '"Edema"').replace('label_map = {{ "Pleural Effusion" = "Effusion" }}\n', "")
    task = '{ name = "multi-label", uncertain = "ones", blank = "zeros" }'
    code, found, _ = checked(settings, task, ["Edema"])
    assert (code, found["refusal"], found["stored"]) == (0, None, {"all": [36]})


@pytest.mark.usefixtures("nih")
def test_numbers_are_shown_by_their_ends_and_middle(checked: Checked) -> None:
    ages = NIH.replace("Finding Labels", "Patient Age").replace('ignore_labels = ["No Finding", "Hernia"]\n', "")
    code, found, text = checked(ages, '{ name = "regression", range = [0, 120], unit = "years" }', ["age"])
    assert (code, found["refusal"], found["but"]) == (0, None, [])
    assert found["stored"] == {"all": [48]}
    for row in ("│ images │ 48 │", "│ least │ 20 │", "│ median │ 31 │", "│ largest │ 43 │"):
        assert row in text
    code, _, text = checked(ages, '{ name = "regression", range = [0, 40] }', ["age"])
    assert code == 65
    assert "labels that the run cannot use: '41 (no number from 0 to 40)', '42 (no number from 0 to 40)'" in text
    assert "Correct the numbers, or name them in data.ignore_labels" in text
    assert "Say in data.label_map" not in text
    code, _, _ = checked(
        f'{ages}\nignore_labels = ["41", "42", "43"]', '{ name = "regression", range = [0, 40] }', ["age"]
    )
    assert code == 0


@pytest.mark.usefixtures("nih")
def test_equal_labels_are_told_and_make_scores_untrue(checked: Checked, nih: Path) -> None:
    table = nih / "Data_Entry_2017_v2020.csv"
    lines = table.read_text(encoding="utf-8").splitlines()
    same = [line.replace(line.split(",")[1], "Edema", 1) for line in lines[1:]]
    table.write_text("\n".join([lines[0], *same]) + "\n", encoding="utf-8")
    code, found, _ = checked(NIH, '{ name = "multi-label" }')
    assert code == 93
    assert found["but"] == [
        "all images to train on have the same label",
        "all images of the test set have the same label",
    ]
    assert found["scores_untrue"]
