"""DICOM files are what a viewer shows of them, in 0..1; the files are made here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray
from pydicom.dataset import Dataset
from pydicom.pixels.processing import apply_windowing
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEGLosslessSV1,
    RLELossless,
    SecondaryCaptureImageStorage,
)
from tests.support.image_files import STEP, input_
from tests.support.image_files import decoded as decode
from tests.support.image_files import dicom as made

from protofed.client.data import dicom
from protofed.client.data.file_entry import UnreadableImageError
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

PAIR = Input(shape=(1, 1, 2))


def pair(low: int, high: int, dtype: str = "uint16") -> NDArray[Any]:
    return np.array([[low, high]], dtype)


def test_the_runs_window_is_in_rescaled_units_and_inverts_monochrome1(tmp_path: Path) -> None:
    stored = pair(1024, 1124)  # of a CT: 0 and 100 Hounsfield units
    path = made(tmp_path / "a", stored, RescaleSlope=1, RescaleIntercept=-1024, WindowCenter=0, WindowWidth=1)
    got = decode(path, input_((1, 1, 2), window=(50, 200)))  # -50..150
    assert got.dtype == np.float32
    np.testing.assert_allclose(got[0, 0], [0.25, 0.75], atol=STEP)
    path = made(tmp_path / "a", pair(0, 4095), 12, PhotometricInterpretation="MONOCHROME1")
    assert decode(path, PAIR)[0, 0].tolist() == [1, 0]
    assert decode(path, input_((1, 1, 2), window=(2047.5, 8190)))[0, 0].tolist() == pytest.approx(
        [0.75, 0.25], abs=STEP
    )


@pytest.mark.parametrize(("dtype", "bits", "low", "high"), [("uint16", 12, 0, 4095), ("int16", 12, -2048, 2047)])
def test_without_a_window_all_that_bits_hold_counts(dtype: str, bits: int, low: int, high: int, tmp_path: Path) -> None:
    assert decode(made(tmp_path / "a", pair(low, high, dtype), bits), PAIR)[0, 0].tolist() == [0, 1]
    rescaled = made(tmp_path / "b", pair(low, high, dtype), bits, RescaleSlope=-2, RescaleIntercept=7)
    assert decode(rescaled, PAIR)[0, 0].tolist() == [1, 0]


def test_a_window_of_one_value_is_a_step(tmp_path: Path) -> None:
    path = made(tmp_path / "a", pair(9, 11), WindowCenter=10, WindowWidth=1)
    assert decode(path, PAIR)[0, 0].tolist() == [0, 1]
    assert "PatientName" not in dicom.open_frames(path, None).dataset


def test_eight_bits_of_grey_are_numbers_in_zero_to_one_and_fitted_as_other_images_are(tmp_path: Path) -> None:
    np.testing.assert_allclose(decode(made(tmp_path / "a", pair(51, 255, "uint8"), 8), PAIR)[0, 0], [0.2, 1], atol=STEP)
    path = made(tmp_path / "b", np.full((8, 4), 4095, np.uint16), 12)
    got = decode(path, input_((3, 4, 4), fit="pad", colours="convert"))
    assert got[:, 0].tolist() == [[0, 1, 1, 0]] * 3


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID", None])
def test_the_files_own_window_is_as_pydicom_has_it(function: str | None, tmp_path: Path) -> None:
    values = np.arange(0, 4096, 7, dtype=np.uint16)[None]
    more: dict[str, Any] = {"WindowCenter": [2000, 1], "WindowWidth": [1500, 1]}
    more |= {"RescaleSlope": 2, "RescaleIntercept": -100, **({"VOILUTFunction": function} if function else {})}
    path = made(tmp_path / "a", values, 12, **more)
    got = decode(path, input_((1, 1, values.shape[1])))
    expected = apply_windowing(values.astype(int) * 2 - 100, pydicom.dcmread(path))
    np.testing.assert_allclose(got[0], (expected + 100) / (2 * 4095), atol=STEP)


@pytest.mark.parametrize(
    ("function", "width", "reason"),
    [
        ("LINEAR", -400, "a width that its function does not allow"),
        ("LINEAR_EXACT", 0, "a width that its function does not allow"),
        ("SIGMOID", 0, "a width that its function does not allow"),
        ("LINEAR", None, "a window's centre and no width"),
    ],
)
def test_a_window_that_cannot_be_is_refused(function: str, width: float | None, reason: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {} if width is None else {"WindowWidth": width}
    path = made(tmp_path / "a", pair(9, 11), WindowCenter=10, VOILUTFunction=function, **more)
    with pytest.raises(UnreadableImageError, match=reason):
        decode(path, PAIR)


def test_the_files_own_table_comes_before_its_window_and_may_begin_below_zero(tmp_path: Path) -> None:
    table = Dataset()
    table.LUTDescriptor = [4, 10, 10]
    table.LUTData = [0, 1023, 341, 682]
    table["LUTData"].VR = "US"
    path = made(
        tmp_path / "a", np.array([[10, 11, 12, 99]], np.uint16), VOILUTSequence=[table], WindowCenter=1, WindowWidth=1
    )
    np.testing.assert_allclose(decode(path, input_((1, 1, 4)))[0, 0], [0, 1, 1 / 3, 2 / 3], atol=STEP)
    table = Dataset()
    table.LUTDescriptor, table.LUTData = [2, 65536 - 1024, 16], [0, 65535]
    table["LUTData"].VR = "US"
    path = made(tmp_path / "a", pair(0, 1), RescaleSlope=1, RescaleIntercept=-1024, VOILUTSequence=[table])
    assert decode(path, PAIR)[0, 0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"NumberOfFrames": 2, "PixelData": bytes(8)}, "several frames"),
        ({"PerFrameFunctionalGroupsSequence": [Dataset(), Dataset()]}, "several frames"),
        ({"PixelData": bytes(2)}, "truncated or damaged"),
        ({"Rows": 60_000, "Columns": 60_000}, "60000 x 60000 pixels"),
        ({"PhotometricInterpretation": "ODD"}, "colours other than RGB"),
        ({"WindowCenter": 1, "WindowWidth": 9, "VOILUTFunction": "CURVE"}, "unknown VOI LUT function"),
    ],
)
def test_what_cannot_be_shown_is_refused_and_names_nobody(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableImageError, match=said) as caught:
        decode(made(tmp_path / "a", pair(0, 1), **more), PAIR)
    assert "Doe" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_a_deflated_file_is_not_inflated_with_or_without_a_preamble(tmp_path: Path) -> None:
    path = made(tmp_path / "a", pair(0, 1), syntax=DeflatedExplicitVRLittleEndian)
    for content in (path.read_bytes(), path.read_bytes()[132:]):
        path.write_bytes(content)
        with pytest.raises(UnreadableImageError, match="deflated"):
            decode(path, PAIR)


def test_a_file_without_an_image_or_of_an_unknown_compression_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "a", pair(0, 1))
    found = pydicom.dcmread(path)
    del found.PixelData
    found.save_as(path)
    (tmp_path / "b").write_bytes(b"\x08\0\x05\0CS\x0a\0ISO_IR 100")  # without a preamble
    compressed = made(tmp_path / "c", pair(0, 1), syntax=RLELossless, SOPClassUID=SecondaryCaptureImageStorage)
    content = compressed.read_bytes()[132:]
    compressed.write_bytes(content[12 + int.from_bytes(content[8:12], "little") :])
    for name, said in (
        ("a", "without an image"),
        ("b", "without an image"),
        ("c", "does not say how it is compressed"),
    ):
        with pytest.raises(UnreadableImageError, match=said):
            decode(tmp_path / name, PAIR)


def test_a_compression_nobody_here_can_undo_is_named(tmp_path: Path) -> None:
    path = made(tmp_path / "a", pair(0, 1))
    found = pydicom.dcmread(path)
    found.file_meta.TransferSyntaxUID = JPEGLosslessSV1
    found.PixelData = pydicom.encaps.encapsulate([bytes(8)])
    found.save_as(path)
    with pytest.raises(UnreadableImageError, match=r"compressed as JPEG Lossless.*no decoder here"):
        decode(path, PAIR)


@pytest.mark.parametrize("syntax", [ImplicitVRLittleEndian, ExplicitVRLittleEndian])
@pytest.mark.parametrize("meta", [True, False])
def test_a_file_without_a_preamble_is_read(syntax: str, meta: bool, tmp_path: Path) -> None:
    path = made(tmp_path / "a", pair(0, 65535), syntax=syntax, SOPClassUID=SecondaryCaptureImageStorage)
    content = path.read_bytes()[132:]
    if not meta:  # the group 2 begins with its own length
        content = content[12 + int.from_bytes(content[8:12], "little") :]
    path.write_bytes(content)
    assert dicom.is_dicom(path)
    assert decode(path, PAIR)[0, 0].tolist() == [0, 1]


def enhanced(path: Path, shared: bool) -> Path:
    """One frame, whose slope, intercept and window are in functional groups."""
    rescale, window, group = Dataset(), Dataset(), Dataset()
    rescale.RescaleSlope, rescale.RescaleIntercept, rescale.RescaleType = 1, -1024, "HU"
    window.WindowCenter, window.WindowWidth, window.VOILUTFunction = 50, 200, "LINEAR_EXACT"
    group.PixelValueTransformationSequence, group.FrameVOILUTSequence = [rescale], [window]
    groups: dict[str, Any] = {"SharedFunctionalGroupsSequence": [group if shared else Dataset()]}
    groups["PerFrameFunctionalGroupsSequence"] = [Dataset() if shared else group]
    return made(path, pair(1024, 1124), NumberOfFrames=1, **groups)


@pytest.mark.parametrize("shared", [True, False])
def test_an_enhanced_file_of_one_frame_is_read_with_its_groups_units_and_window(shared: bool, tmp_path: Path) -> None:
    path = enhanced(tmp_path / "a", shared)
    np.testing.assert_allclose(decode(path, PAIR)[0, 0], [0.25, 0.75], atol=STEP)  # -50..150
    np.testing.assert_allclose(decode(path, input_((1, 1, 2), window=(0, 400)))[0, 0], [0.5, 0.75], atol=STEP)


def test_without_pydicom_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path / "a", pair(0, 1))
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(DataError, match=r"\.whl\[dicom\]'") as caught:
        decode(path, PAIR)
    assert not isinstance(caught.value, UnreadableImageError)
