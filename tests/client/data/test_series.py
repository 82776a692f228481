"""A folder of DICOM files is one volume, in the order of its slices; what has no order is refused by name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.image_files import decoded as decode
from tests.support.image_files import dicom, input_, save, settings

from protofed.client.data.decoding import list_parts
from protofed.client.data.file_entry import UnreadableImageError
from protofed.client.data.hold_out import units_of_files
from protofed.client.data.image_files import scan
from protofed.common.config.data import Data
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

AXIAL = [1, 0, 0, 0, 1, 0]
RUN = ("mel", "nv")


def slices(folder: Path, values: Sequence[int], headers: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Files 00, 01, … of these values; the headers are of each, or none."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, value in enumerate(values):
        dicom(folder / f"{number:02}", np.array([[value]], np.uint8), 8, **(headers[number] if headers else {}))
    return folder


def at(*heights: float, orientation: Sequence[float] = AXIAL, **more: Any) -> list[dict[str, Any]]:
    """Headers of slices at these heights along z."""
    return [
        {"ImageOrientationPatient": list(orientation), "ImagePositionPatient": [5, 6, z], "SeriesInstanceUID": "1.2"}
        | {name: value[place] for name, value in more.items()}
        for place, z in enumerate(heights)
    ]


def order(folder: Path) -> list[int]:
    """The slices' values, in the volume's order."""
    run = input_((1, 1, 1), frames="all")
    return [round(float(decode(folder, run, part)[0, 0, 0]) * 255) for part in list_parts(folder, "all")]


def test_slices_are_ordered_by_their_place_whatever_their_number(tmp_path: Path) -> None:
    assert order(slices(tmp_path / "a", [10, 20, 30], at(3.5, -2, 1, InstanceNumber=[1, 2, 3]))) == [20, 30, 10]
    # Sagittal: rows to posterior, columns to the feet. The normal, their product, points to the patient's right (-x).
    sagittal = at(0, 0, 0, orientation=[0, 1, 0, 0, 0, -1])
    for header, x in zip(sagittal, (1, 3, 2), strict=True):
        header["ImagePositionPatient"] = [x, 0, 0]
    assert order(slices(tmp_path / "b", [10, 20, 30], sagittal)) == [20, 30, 10]


def test_without_a_place_of_their_own_slices_are_ordered_by_number(tmp_path: Path) -> None:
    assert order(slices(tmp_path / "a", [10, 20], [{"InstanceNumber": 10}, {"InstanceNumber": 9}])) == [20, 10]
    beating = at(1, 1, 1, InstanceNumber=[3, 1, 2])  # one slice of a heart at three times
    assert order(slices(tmp_path / "b", [10, 20, 30], beating)) == [20, 30, 10]
    partly = at(1, 2, InstanceNumber=[2, 1])
    del partly[0]["ImagePositionPatient"]
    assert order(slices(tmp_path / "c", [10, 20], partly)) == [20, 10]


def test_the_order_follows_files_that_change(tmp_path: Path) -> None:
    folder = slices(tmp_path, [10, 20], at(1, 2))
    assert order(folder) == [10, 20]
    slices(tmp_path, [10, 20], at(2, 1.5))
    os.utime(folder / "00", (0, 0))
    assert order(folder) == [20, 10]


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ([{}, {}], "lack ImagePositionPatient with ImageOrientationPatient.*lack InstanceNumber"),
        ([{"InstanceNumber": 1}, {}], "lack InstanceNumber"),
        ([{"InstanceNumber": 1}, {"InstanceNumber": 1}], "lack InstanceNumber, or share it"),
        (at(1, 1), "or share it"),
        ([*at(1), *at(2, orientation=[0, 1, 0, 0, 0, -1])], "not parallel"),
        ([*at(1), at(2)[0] | {"SeriesInstanceUID": "1.3"}], "several DICOM series; expected a folder for each"),
    ],
)
def test_a_folder_that_is_no_volume_is_refused(headers: list[dict[str, Any]], said: str, tmp_path: Path) -> None:
    folder = slices(tmp_path / "Doe", [10, 20], headers)
    for frames in ("middle", "max"):
        with pytest.raises(UnreadableImageError, match=said) as caught:
            decode(folder, input_((1, 1, 1), frames=frames))
        assert "Doe" not in str(caught.value)


def test_other_files_in_the_folder_are_refused_and_what_systems_leave_is_not_seen(tmp_path: Path) -> None:
    folder, run = slices(tmp_path / "a", [10, 20, 30], at(1, 2, 3)), input_((1, 1, 1), frames="middle")
    for name in ("DICOMDIR", "readme.txt", ".hidden"):
        (folder / name).write_bytes(b"x")
    (folder / "other").mkdir()
    assert decode(folder, run)[0, 0, 0] * 255 == pytest.approx(20)
    with pytest.raises(UnreadableImageError, match="a series of 3 DICOM files; expected one image a file"):
        decode(folder, input_((1, 1, 1)))
    save(folder / "a.png")
    with pytest.raises(UnreadableImageError, match="files that are no DICOM"):
        decode(folder, run)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableImageError, match="a folder without images"):
        decode(tmp_path / "empty", run)
    (folder / "a.png").write_bytes(b"")
    with pytest.raises(UnreadableImageError, match=r"^empty$"):
        decode(folder, run)


def test_a_folder_of_one_file_is_that_file(tmp_path: Path) -> None:
    folder = slices(tmp_path / "a", [10])
    assert decode(folder, input_((1, 1, 1)))[0, 0, 0] * 255 == pytest.approx(10)


def test_a_projection_is_over_the_slices(tmp_path: Path) -> None:
    folder = slices(tmp_path / "a", [10, 40, 30, 20], at(1, 2, 3, 4))
    found = {how: float(decode(folder, input_((1, 1, 1), frames=how))[0, 0, 0]) * 255 for how in ("max", "mean")}
    assert found == {"max": pytest.approx(40), "mean": pytest.approx(25)}


def cohort(root: Path, **more: Any) -> Data:
    slices(root / "mel" / "P1" / "ct", [1, 2], at(1, 2))
    slices(root / "nv" / "P2", [3, 4, 5], at(1, 2, 3))
    slices(root / "nv", [6])  # by itself: it lies in the class's folder
    return settings("folder", root, series="folder", **more)


def test_each_folder_below_a_class_is_one_example_and_its_slices_are_of_one_patient(tmp_path: Path) -> None:
    data = cohort(tmp_path, group_pattern=r"^[^/]+/([^/]+)")
    found = scan(data, RUN, 2, "middle")
    assert [(item.name, item.group) for item in found.items] == [("mel/P1/ct", "P1"), ("nv/00", "00"), ("nv/P2", "P2")]
    assert [item.path for item in found.items] == [tmp_path / item.name for item in found.items]
    parts = scan(data, RUN, 2, "all").items
    assert [(item.name, item.group) for item in parts if item.part] == [
        *((f"mel/P1/ct, frame {number}", "P1") for number in (1, 2)),
        *((f"nv/P2, frame {number}", "P2") for number in (1, 2, 3)),
    ]
    without = scan(cohort(tmp_path), RUN, 2, "all").items
    assert {item.group for item in without} == {"mel/P1/ct", "nv/00", "nv/P2"}


def test_a_folder_with_files_of_two_patients_has_no_group_and_is_refused(tmp_path: Path) -> None:
    folder = slices(tmp_path / "nv" / "all", [1, 2], at(1, 2))
    for number, patient in enumerate(("P1", "P2")):
        (folder / f"{number:02}").rename(folder / f"{patient}_{number}")
    found = scan(settings("folder", tmp_path, series="folder", group_pattern=r"/(P\d)_"), RUN, 2)
    assert [item.name for item in found.ungrouped] == ["nv/all"]


def test_splits_in_the_folders_of_classes_are_seen_in_series_too(tmp_path: Path) -> None:
    for name in ("nv/train", "nv/test", "mel/train", "mel/test"):
        slices(tmp_path / name, [1, 2], at(1, 2))
    with pytest.raises(DataError, match="splits in the folders of classes"):
        scan(settings("folder", tmp_path, series="folder"), RUN, 2)


def test_a_row_of_a_manifest_may_name_the_folder_of_a_series(tmp_path: Path) -> None:
    slices(tmp_path / "ct 1", [1, 2], at(1, 2))
    save(tmp_path / "images" / "ct 2.png")
    (tmp_path / "images" / "ct 2").mkdir()  # a file of the name comes first
    (tmp_path / "all.csv").write_text("path,label\nct 1,nv\nct 2,mel\n")
    found = scan(settings("manifest", tmp_path / "all.csv"), RUN, 2, "all")
    assert [(item.name, item.group) for item in found.items] == [
        *((f"ct 1, frame {number}", "ct 1") for number in (1, 2)),
        ("ct 2", "images/ct 2.png"),
    ]
    (tmp_path / "ct 1" / "02").symlink_to(tmp_path.parent)
    with pytest.raises(DataError, match="row 2: links lead its path out"):
        scan(settings("manifest", tmp_path / "all.csv"), RUN, 2)


def test_the_unit_of_a_folder_is_the_bytes_of_its_files(tmp_path: Path) -> None:
    folders = [slices(tmp_path / name, values) for name, values in (("a", [1, 2]), ("b", [1, 3]), ("c", [1, 2]))]
    first, second, third = units_of_files(folders).tolist()
    assert first == third != second


def test_series_is_of_folders_alone() -> None:
    with pytest.raises(
        ValueError, match=r"series is of source folder; remove it\. In a manifest the path of a row may"
    ):
        Data.model_validate({"source": "manifest", "series": "folder"})


def test_the_default_rule_leaves_no_trace_in_a_recipe() -> None:
    assert "frames" not in Input(shape=(1, 2, 2)).model_dump()
    rule = input_((1, 2, 2), frames={"every": 3})
    assert Input.model_validate_json(rule.model_dump_json()) == rule
    for wrong in ("two", 3, {"every": 2, "from": 1}):
        with pytest.raises(ValueError, match=r'expected "one", "middle", "max", "mean", "all", or \{ every = n \}'):
            input_((1, 2, 2), frames=wrong)
