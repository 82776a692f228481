"""Compressed DICOM files have the pixels of what was compressed, one frame or several; the files are made here."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydicom.encaps import encapsulate
from pydicom.pixels.decoders.base import get_decoder
from pydicom.uid import (
    JPEG2000,
    UID,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLosslessSV1,
    JPEGLSLossless,
    RLELossless,
)
from tests.support.image_files import decoded as decode
from tests.support.image_files import dicom_frames, input_

from protofed.client.data import dicom
from protofed.client.data.decoding import list_parts
from protofed.client.data.file_entry import UnreadableImageError

# Two frames [64, 64], smooth as lossy compressions want them.
SMOOTH = np.stack([np.add.outer(np.arange(64), np.arange(64)) + 40 * number for number in (0, 1)]).astype(np.uint8)
# Lossless JPEG (process 14, predictor 1) of a grey image of 2 x 2 pixels, all 128: each difference is 0, of one bit.
LOSSLESS = bytes.fromhex(
    "ffd8 ffc3 000b 08 0002 0002 01 01 11 00 ffc4 0014 00 01000000000000000000000000000000 00"
    "ffda 0008 01 01 00 01 00 00 0f ffd9".replace(" ", "")
)


def compressed(path: Path, syntax: UID, codestreams: Sequence[bytes], frames: NDArray[np.uint8], **more: str) -> Path:
    """The file of uncompressed frames with these in place of its pixels."""
    found = pydicom.dcmread(dicom_frames(path, frames, 8))
    found.file_meta.TransferSyntaxUID = syntax
    found.PixelData = encapsulate(list(codestreams))
    for name, value in more.items():
        setattr(found, name, value)
    found.save_as(path)
    return path


def by_pillow(frame: NDArray[np.uint8], kind: str, **more: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, kind, **more)
    return file.getvalue()


def check(path: Path, frames: NDArray[np.uint8], atol: float) -> None:
    """The frames by their numbers, and their maximum."""
    grey = frames.ndim == 3
    run = input_((1 if grey else 3, *frames.shape[1:3]), frames="all")
    unit = 1 if grey else 255
    for part, frame in zip(list_parts(path, "all"), frames, strict=True):
        found = np.moveaxis(decode(path, run, part), 0, -1).reshape(frame.shape)
        np.testing.assert_allclose(found / unit, frame / 255, atol=atol / 255)


@pytest.mark.parametrize("syntax", [RLELossless, JPEG2000Lossless, JPEG2000, JPEGBaseline8Bit])
def test_grey_frames(syntax: UID, tmp_path: Path) -> None:
    atol = {JPEG2000: 3.0, JPEGBaseline8Bit: 3.0}.get(syntax, 1e-4)
    if syntax == JPEGBaseline8Bit:
        streams = [by_pillow(frame, "JPEG", quality=95) for frame in SMOOTH]
        path = compressed(tmp_path / "a", syntax, streams, SMOOTH)
    else:
        found = pydicom.dcmread(dicom_frames(tmp_path / "a", SMOOTH, 8))
        found.compress(syntax, generate_instance_uid=False, j2k_cr=[4] if syntax == JPEG2000 else None)
        found.save_as(path := tmp_path / "a")
    check(path, SMOOTH, atol)


def test_colours_of_jpeg_and_jpeg_2000(tmp_path: Path) -> None:
    frames = np.stack((SMOOTH, 255 - SMOOTH, SMOOTH // 2), axis=3)
    streams = [by_pillow(frame, "JPEG", quality=95, subsampling=0) for frame in frames]
    check(
        compressed(tmp_path / "a", JPEGBaseline8Bit, streams, frames, PhotometricInterpretation="YBR_FULL"), frames, 4
    )
    streams = [by_pillow(frame, "JPEG2000", no_jp2=True, mct=1) for frame in frames]
    check(
        compressed(tmp_path / "b", JPEG2000Lossless, streams, frames, PhotometricInterpretation="YBR_RCT"), frames, 1e-4
    )


@pytest.mark.skipif(not get_decoder(JPEGLosslessSV1).is_available, reason="needs the extra dicom-jpeg")
def test_lossless_jpeg(tmp_path: Path) -> None:
    flat = np.full((2, 2, 2), 128, np.uint8)
    check(compressed(tmp_path / "a", JPEGLosslessSV1, [LOSSLESS, LOSSLESS], flat), flat, 1e-4)


@pytest.mark.skipif(not get_decoder(JPEGLSLossless).is_available, reason="needs the extra dicom-jpeg")
def test_jpeg_ls_of_pydicoms_own_file_is_its_uncompressed_one(tmp_path: Path) -> None:
    files = Path(pydicom.__file__).parent / "data" / "test_files"
    pair = [files / name for name in ("MR_small_jpeg_ls_lossless.dcm", "MR_small.dcm")]
    if not all(path.is_file() for path in pair):
        pytest.skip("this build of pydicom brings no test files")
    assert pydicom.dcmread(pair[0]).file_meta.TransferSyntaxUID == JPEGLSLossless
    run = input_((1, 64, 64), window=(1000, 2000))
    np.testing.assert_array_equal(decode(pair[0], run), decode(pair[1], run))


@pytest.mark.parametrize(("syntax", "package"), [(JPEGLSLossless, "pylibjpeg-libjpeg"), (JPEG2000, "pylibjpeg")])
def test_without_a_decoder_its_package_and_extra_are_named(
    syntax: UID, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compressed(tmp_path / "a", syntax, [bytes(8)], SMOOTH[:1])
    monkeypatch.setattr(type(get_decoder(JPEG2000)), "is_available", False)
    extra = "dicom-jpeg" if syntax == JPEGLSLossless else "dicom"
    with pytest.raises(UnreadableImageError, match=rf"no decoder here: install {package} \(extra {extra}\), or decom"):
        decode(path, input_((1, 64, 64)))


def test_damaged_frames_are_unreadable_by_themselves(tmp_path: Path) -> None:
    whole = by_pillow(SMOOTH[0], "JPEG", quality=95)
    path = compressed(tmp_path / "a", JPEGBaseline8Bit, [whole, b"Doe" * 50], SMOOTH)
    run = input_((1, 64, 64), frames="all")
    assert decode(path, run, "frame 1").shape == (1, 64, 64)
    with pytest.raises(UnreadableImageError, match="DICOM") as caught:
        decode(path, run, "frame 2")
    assert "Doe" not in str(caught.value)
    assert dicom.count_frames(path) == 2
