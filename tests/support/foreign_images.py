"""Compares the decoder with independent ones over files that other projects test theirs with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tests.support import dicom_reference, tiff_files

from protofed.client.data import dicom
from protofed.client.data.decoding import open_image, silence_decoders
from protofed.client.data.file_entry import UnreadableImageError

MAX_BYTES = 1_000_000
LOSSY = 6 / 255  # decoders of JPEG and of WebP round differently
EXACT = 1.01 / 255  # 16 bits of a palette become 8
OPENCV_ERRS = {
    "rgb32h52.bmp": "takes no masks from a header of 52 bytes",
    "mmap_error.bmp": "believes an offset of the pixels that lies within the palette",
    "rgb16.bmp": "multiplies 5 bits by 8, so that white is 248",
}


def compare(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Names of the files below `MAX_BYTES` by what came of them: equal, refused, wrong, or without a reference.

    Whatever else the decoder raises is not caught.
    """
    outcomes: dict[str, list[str]] = {"equal": [], "refused": [], "wrong": [], "without a reference": []}
    for path in paths:
        if path.is_file() and path.stat().st_size < MAX_BYTES:
            outcome, text = _outcome(path)
            outcomes[outcome].append(f"{path.name}: {text}")
    return outcomes


def _outcome(path: Path) -> tuple[str, str]:
    try:
        with silence_decoders():
            image = open_image(path, None)
    except UnreadableImageError as error:
        return "refused", str(error)
    pixels = _colours(np.asarray(image) / (1.0 if image.mode == "F" else 255.0))
    reference = _reference(path)
    if reference is None:
        return "without a reference", image.mode
    if reference.shape != pixels.shape:
        return "wrong", f"{pixels.shape}, not {reference.shape}"
    difference = float(np.abs(reference - pixels).max())
    lossy = path.open("rb").read(2) in (b"\xff\xd8", b"RI") or path.suffix in (".jp2", ".j2k")
    return ("equal" if difference <= (LOSSY if lossy else EXACT) else "wrong"), f"{difference:.4f}"


def _colours(unit: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.repeat(unit[..., None], 3, axis=2) if unit.ndim == 2 else unit[..., :3]


def _reference(path: Path) -> NDArray[np.float64] | None:
    if dicom.is_dicom(path):
        return _colours(dicom_reference.reference(path))
    if path.open("rb").read(2) in (b"II", b"MM"):
        try:
            return _colours(tiff_files.reference(path))
        except (ValueError, NotImplementedError, ImportError):  # tifffile lacks its codecs, or the file many strips
            pass
    values = cv2.imread(str(path), cv2.IMREAD_ANYDEPTH | cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    if values is None or path.name in OPENCV_ERRS:
        return None
    unit = np.asarray(values[..., ::-1] / {"uint8": 255, "uint16": 65535, "float32": 1}[str(values.dtype)])
    return _turned(unit, _orientation(path))


def _orientation(path: Path) -> int:
    with Image.open(path) as image:
        if image.format == "TIFF":  # OpenCV turns these whatever its flags say
            return 1
        return int(image.getexif().get(0x0112, 1))


def _turned(pixels: NDArray[np.float64], orientation: int) -> NDArray[np.float64]:
    """EXIF's eight orientations (TIFF 6.0, Orientation): OpenCV does not read it of every format."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels[:, ::-1] if orientation in (2, 3, 6, 7) else pixels
