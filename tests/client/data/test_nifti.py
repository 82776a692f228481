"""A NIfTI volume has the slices that a DICOM series of the same scan has, however its axes are stored."""

from __future__ import annotations

import gzip
import itertools
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.image_files import decoded as decode
from tests.support.image_files import dicom, input_, settings

from protofed.client.data import nifti
from protofed.client.data.decoding import list_parts
from protofed.client.data.file_entry import UnreadableImageError
from protofed.client.data.image_files import scan
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

# [x, y, z] of 2 x 3 x 4: from left to right, from posterior to anterior, from the feet to the head.
VOLUME = np.arange(24, dtype=np.uint8).reshape(2, 3, 4) * 10
RUN = ("mel", "nv")


def rule(frames: Any, **more: Any) -> Input:
    return input_((1, 3, 2), frames=frames, **more)


def made(path: Path, values: NDArray[Any] = VOLUME, affine: NDArray[Any] | None = None, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = more.get("kind", nibabel.Nifti1Image)
    image = kind(values, np.eye(4) if affine is None else affine)
    if "scaling" in more:
        image.header.set_slope_inter(*more["scaling"])
    content = image.to_bytes()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


def shown(index: int, values: NDArray[Any] = VOLUME) -> NDArray[Any]:
    """A slice as a radiologist sees it: the first row is anterior, the first column the patient's right."""
    return values[::-1, ::-1, index].T


def unit(path: Path, input_: Input, part: str = "") -> NDArray[Any]:
    return decode(path, input_, part).squeeze(0)


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "IM0001"])
def test_each_rule_takes_its_slices(name: str, tmp_path: Path) -> None:
    path = made(tmp_path / name)
    assert list(list_parts(path, "all")) == ["frame 1", "frame 2", "frame 3", "frame 4"]
    for index in range(4):
        np.testing.assert_allclose(unit(path, rule("all"), f"frame {index + 1}"), shown(index) / 255, atol=1e-5)
    np.testing.assert_allclose(unit(path, rule("middle")), shown(2) / 255, atol=1e-5)
    np.testing.assert_allclose(unit(path, rule("max")), shown(3) / 255, atol=1e-5)
    np.testing.assert_allclose(unit(path, rule("mean")), shown(0, VOLUME.mean(2, keepdims=True)) / 255, atol=1e-5)
    with pytest.raises(UnreadableImageError, match="a NIfTI volume of 4 slices; expected one image a file"):
        unit(path, rule("one"))


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("flips", list(itertools.product([1, -1], repeat=3)))
def test_axes_may_be_stored_in_any_order_and_direction(
    axes: tuple[int, ...], flips: tuple[int, ...], tmp_path: Path
) -> None:
    stored = VOLUME.transpose(axes)[:: flips[0], :: flips[1], :: flips[2]]
    affine = np.zeros((4, 4))
    affine[3, 3] = 1
    for axis, (anatomical, flip) in enumerate(zip(axes, flips, strict=True)):
        affine[anatomical, axis] = flip * 1.5
    path = made(tmp_path / "a.nii", stored, affine)
    for index in (0, 3):
        np.testing.assert_allclose(unit(path, rule("all"), f"frame {index + 1}"), shown(index) / 255, atol=1e-5)
    assert len(list_parts(path, "all")) == 4


def test_a_series_and_a_nifti_file_of_one_scan_have_the_same_slices(tmp_path: Path) -> None:
    """DICOM's axes point to the left and to posterior, those of NIfTI to the right and to anterior."""
    (tmp_path / "ct").mkdir()
    for z in range(4):
        where: dict[str, Any] = {"ImageOrientationPatient": [1, 0, 0, 0, 1, 0], "ImagePositionPatient": [0, 0, z]}
        dicom(tmp_path / "ct" / f"{9 - z}", np.ascontiguousarray(shown(z)), 8, **where)
    path = made(tmp_path / "a.nii.gz")
    for frames, part in (("middle", ""), ("max", ""), ("mean", ""), ("all", "frame 1"), ("all", "frame 4")):
        np.testing.assert_array_equal(unit(path, rule(frames), part), unit(tmp_path / "ct", rule(frames), part))


def test_values_are_scaled_as_those_of_other_files(tmp_path: Path) -> None:
    hounsfield = VOLUME.astype(np.int16) - 100
    path = made(tmp_path / "a.nii", hounsfield)
    np.testing.assert_allclose(
        unit(path, rule("middle", window=(0, 200))), (shown(2, hounsfield) / 200 + 0.5).clip(0, 1), atol=1e-5
    )
    scaled = made(tmp_path / "b.nii", VOLUME, scaling=(2, -100))
    np.testing.assert_allclose(
        unit(scaled, rule("middle", window=(0, 400))), ((shown(2) * 2.0 - 100) / 400 + 0.5).clip(0, 1), atol=1e-5
    )
    for needs_window in (path, scaled):
        with pytest.raises(UnreadableImageError, match=r"need input\.window"):
            unit(needs_window, rule("middle"))
    deep = made(tmp_path / "c.nii", VOLUME.astype(np.uint16) * 257, kind=nibabel.Nifti2Image)
    np.testing.assert_allclose(unit(deep, rule("middle")), shown(2) / 255, atol=1e-5)
    floats = made(tmp_path / "d.nii", (VOLUME / 255).astype(np.float32))
    np.testing.assert_allclose(unit(floats, rule("middle")), shown(2) / 255, atol=1e-5)
    with pytest.raises(UnreadableImageError, match="values that are no numbers"):
        unit(made(tmp_path / "e.nii", np.full((2, 3, 1), np.nan, np.float32)), rule("one"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.zeros((2, 3, 4, 5), np.uint8), "of 4 dimensions; expected 3"),
        (np.zeros((2, 3), np.uint8), "of 2 dimensions; expected 3"),
        (np.zeros((2, 3, 4), np.complex64), "colours or complex numbers"),
        (np.zeros((2, 3, 4), [(name, "u1") for name in "RGB"]), "colours or complex numbers"),
    ],
)
def test_what_is_no_volume_of_one_number_a_voxel_is_refused(values: NDArray[Any], said: str, tmp_path: Path) -> None:
    path = made(tmp_path / "Doe.nii", values)
    with pytest.raises(UnreadableImageError, match=said) as caught:
        unit(path, rule("middle"))
    assert "Doe" not in str(caught.value)
    assert list(list_parts(path, "all")) == [""]


def test_a_volume_whose_axes_have_no_direction_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "a.nii")
    content = bytearray(path.read_bytes())
    content[312:328] = bytes(16)  # the sform's row of z
    path.write_bytes(content)
    with pytest.raises(UnreadableImageError, match="axes have no direction; expected a valid sform or qform"):
        unit(path, rule("middle"))


def test_a_fourth_dimension_of_one_is_none(tmp_path: Path) -> None:
    path = made(tmp_path / "a.nii", VOLUME[..., None])
    np.testing.assert_allclose(unit(path, rule("middle")), shown(2) / 255, atol=1e-5)


def test_damaged_and_huge_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made(tmp_path / "a.nii").read_bytes()
    (tmp_path / "a.nii").write_bytes(whole[:-8])
    with pytest.raises(UnreadableImageError, match="NIfTI that is truncated or damaged"):
        unit(tmp_path / "a.nii", rule("max"))
    (tmp_path / "b.nii.gz").write_bytes(gzip.compress(b"no image" * 100))
    with pytest.raises(UnreadableImageError, match="no known type"):
        unit(tmp_path / "b.nii.gz", rule("max"))
    monkeypatch.setattr(nifti, "MAX_FILE_BYTES", 300)
    with pytest.raises(UnreadableImageError, match="after decompression"):
        unit(made(tmp_path / "c.nii.gz"), rule("max"))
    monkeypatch.setattr(nifti, "MAX_PIXELS", 5)
    with pytest.raises(UnreadableImageError, match="slices of more than 5 pixels"):
        unit(made(tmp_path / "d.nii"), rule("max"))


def test_compressed_volumes_are_found_in_folders_and_by_their_id(tmp_path: Path) -> None:
    made(tmp_path / "nv" / "a.nii.gz")
    (tmp_path / "nv" / "notes.tar.gz").write_bytes(b"x")
    found = scan(settings("folder", tmp_path), RUN, 2, "all")
    assert [(item.name, item.group) for item in found.items][:1] == [("nv/a.nii.gz, frame 1", "nv/a.nii.gz")]
    assert (len(found.items), list(found.left_out)) == (4, ["nv/notes.tar.gz"])
    (tmp_path / "all.csv").write_text("path,label\na,nv\n")
    (item,) = scan(settings("manifest", tmp_path / "all.csv"), RUN, 2).items
    assert item.path == tmp_path / "nv" / "a.nii.gz"


def test_without_nibabel_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path / "nv" / "a.nii")
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(DataError, match=r"\.whl\[nifti\]'") as caught:
        decode(path, rule("max"))
    assert not isinstance(caught.value, UnreadableImageError)
    with pytest.raises(DataError, match=r"\[nifti\]"):
        scan(settings("folder", tmp_path), RUN, 2, "all")
