"""Image files that tests make, and folders of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydicom import Dataset
from pydicom.dataset import FileMetaDataset
from pydicom.uid import UID, ExplicitVRLittleEndian, RLELossless, SecondaryCaptureImageStorage

from protofed.client.data.decoding import decode, in_unit
from protofed.common.config.data import Data
from protofed.common.config.tables import Input

STEP = 1 / 65535

RGB = Input(shape=(3, 4, 4))
GREY = Input(shape=(1, 4, 4))


def settings(source: str, root: Path, **more: Any) -> Data:
    return Data.model_validate({"source": source, "root": root, **more})


def input_(shape: tuple[int, int, int], **more: Any) -> Input:
    return Input.model_validate({"shape": shape, **more})


def decoded(path: Path, input_: Input, part: str = "") -> NDArray[Any]:
    """`decode` of a file: uint8, or what 16 bits say in 0..1, which is exact to half of `STEP`."""
    pixels = decode(path, input_, part)
    return pixels if pixels.dtype == np.uint8 else in_unit(pixels)


def ramp(height: int = 4, width: int = 4, channels: int = 3) -> NDArray[np.uint8]:
    """[H, W, channels], or [H, W] of one: no two pixels alike, as far as 8 bits go."""
    values = np.arange(height * width * channels, dtype=np.uint32).astype(np.uint8)
    return values.reshape((height, width, channels) if channels > 1 else (height, width))


def save(path: Path, pixels: NDArray[Any] | None = None, **more: Any) -> Path:
    """An image file of these pixels, its folders made; the suffix says of which type."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(ramp() if pixels is None else pixels).save(path, **more)
    return path


def shade(value: int) -> NDArray[np.uint8]:
    """An RGB image of 4 x 4 pixels, all of one value."""
    return np.full((4, 4, 3), value, np.uint8)


def classes(root: Path, names: Mapping[str, int], first: int = 0) -> Path:
    """So many images `<class>/<number>.png`, whose shade is their number: 10, 11, … of the second class, and so on."""
    for place, (name, count) in enumerate(names.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            save(root / name / f"{number:02}.png", shade(first + 10 * place + number))
    return root


def dicom(path: Path, pixels: NDArray[Any], bits: int = 16, syntax: str = ExplicitVRLittleEndian, **more: Any) -> Path:
    """A file of these stored values, [H, W] or [H, W, 3], with a patient's name in it."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian if syntax == RLELossless else UID(syntax)
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = UID("1.2.3")
    found = Dataset()
    found.file_meta = meta
    found.PatientName = "Doe^Jane"
    found.Rows, found.Columns = pixels.shape[:2]
    found.SamplesPerPixel = 3 if pixels.ndim == 3 else 1
    found.PhotometricInterpretation = "RGB" if pixels.ndim == 3 else "MONOCHROME2"
    if pixels.ndim == 3:
        found.PlanarConfiguration = 0
    found.BitsAllocated = 8 * pixels.dtype.itemsize
    found.BitsStored, found.HighBit = bits, bits - 1
    found.PixelRepresentation = int(pixels.dtype.kind == "i")
    found.PixelData = pixels.tobytes()
    for name, value in more.items():
        setattr(found, name, value)
    if syntax == RLELossless:
        found.compress(RLELossless, generate_instance_uid=False)
    found.save_as(path, enforce_file_format=True)
    return path


def dicom_frames(path: Path, frames: NDArray[Any], bits: int = 16, **more: Any) -> Path:
    """A DICOM file of several frames, [n, H, W] or [n, H, W, 3]."""
    return dicom(path, frames[0], bits, NumberOfFrames=len(frames), PixelData=frames.tobytes(), **more)


def pages(path: Path, frames: NDArray[Any], **more: Any) -> Path:
    """A file of several frames or pages by Pillow: TIFF, GIF or WebP by its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *others = map(Image.fromarray, frames)
    first.save(path, save_all=True, append_images=others, **more)
    return path
