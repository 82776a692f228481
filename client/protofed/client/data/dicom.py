"""DICOM files by pydicom. Of all their elements only those that say what pixels mean are read: no name of a patient."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protofed.client.data.image_error import MOST_PIXELS, UnreadableImageError
from protofed.common.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image
    from pydicom import Dataset

Values = NDArray[Any]  # [H, W], in the file's own units
_READ = [
    *("Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelData", "ExtendedOffsetTable"),
    *("ExtendedOffsetTableLengths", "RescaleSlope", "RescaleIntercept", "ModalityLUTSequence", "VOILUTSequence"),
    *("WindowCenter", "WindowWidth", "VOILUTFunction", "PerFrameFunctionalGroupsSequence"),
    *(
        f"{colour}PaletteColorLookupTable{part}"
        for colour in ("Red", "Green", "Blue")
        for part in ("Descriptor", "Data")
    ),
    *(f"Segmented{colour}PaletteColorLookupTableData" for colour in ("Red", "Green", "Blue")),
]
_DEFLATED = "1.2.840.10008.1.2.1.99"


def is_one(path: Path) -> bool:
    """Whether a file is DICOM, by its preamble (PS3.10, 7.1)."""
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def read(path: Path, window: tuple[float, float] | None) -> Image:
    """One image: mode F (grey) in 0..1, or RGB of 8 bits.

    Grey values are rescaled by the file's slope and intercept, then windowed by the run's window, else the file's own
    VOI LUT or window (the first), else by all that its bits can hold; MONOCHROME1 is inverted.

    Args:
        window: the run's centre and width, in rescaled units.

    Raises:
        Unreadable: no image, several frames, a compression without a decoder, more than 8 bits of colour.
        DataError: pydicom is not installed.
    """
    from PIL import Image

    found = _checked(path)
    kind = str(found.PhotometricInterpretation)
    if kind in ("MONOCHROME1", "MONOCHROME2"):
        plane = _unit(found, window)
        return Image.fromarray(1 - plane if kind == "MONOCHROME1" else plane)
    array = _colours(found, kind)
    if array.dtype != np.uint8 or array.ndim != 3:
        raise UnreadableImageError(f"DICOM in {kind} with {array.dtype} values; expected 8 bits a colour")
    return Image.fromarray(array)


def _checked(path: Path) -> Dataset:
    """What is needed of the file, whose pixels may be decoded."""
    pydicom = _library()
    meta = pydicom.filereader.read_file_meta_info(path)
    if meta.TransferSyntaxUID == _DEFLATED:  # all of it would be inflated before anything can be asked
        raise UnreadableImageError("a deflated DICOM file; expected another transfer syntax")
    found: Dataset = pydicom.dcmread(path, specific_tags=_READ)
    if "PixelData" not in found:
        raise UnreadableImageError("DICOM without an image")
    if int(found.get("NumberOfFrames") or 1) != 1 or "PerFrameFunctionalGroupsSequence" in found:
        raise UnreadableImageError("DICOM of several frames; expected one image a file")
    if found.Rows * found.Columns > MOST_PIXELS:
        raise UnreadableImageError(f"{found.Columns} x {found.Rows} pixels; expected at most {MOST_PIXELS:,}")
    syntax = meta.TransferSyntaxUID
    if syntax.is_compressed and not pydicom.pixels.get_decoder(syntax).is_available:
        raise UnreadableImageError(f"DICOM compressed as {syntax.name}, for which pydicom has no decoder here")
    return found


def _library() -> Any:
    try:
        import pydicom
        import pydicom.pixels
    except ModuleNotFoundError as error:
        raise DataError("DICOM files need pydicom, which is not installed: pip install 'protofed[dicom]'") from error
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)  # its warnings quote what stands in the file
    return pydicom


def _unit(found: Dataset, window: tuple[float, float] | None) -> NDArray[np.float32]:
    """[H, W] in 0..1."""
    from pydicom.pixels.processing import apply_modality_lut

    values = apply_modality_lut(found.pixel_array, found)
    if window is not None:
        unit = linear(values, *window)
    elif "VOILUTSequence" in found:
        unit = _looked_up(values, found)
    elif found.get("WindowCenter") is not None:
        unit = _own_window(values, found)
    else:
        low, high = sorted(float(end) for end in apply_modality_lut(_stored_ends(found), found))
        unit = linear(values, (low + high) / 2, high - low)
    if not np.isfinite(unit).all():
        raise UnreadableImageError("DICOM whose window or range is no number")
    return unit.clip(0, 1).astype(np.float32)


def linear(values: Values, centre: float, width: float) -> Values:
    """What is `width` wide around `centre` as 0..1, the rest beyond (LINEAR_EXACT of PS3.3, C.11.2.1.3.2)."""
    unit: Values = (values.astype(np.float64) - centre) / width + 0.5
    return unit


def _own_window(values: Values, found: Dataset) -> Values:
    """The first of the file's windows, by its own function (PS3.3, C.11.2.1.2 and C.11.2.1.3)."""
    centre, width = (float(np.atleast_1d(found[name].value)[0]) for name in ("WindowCenter", "WindowWidth"))
    match found.get("VOILUTFunction") or "LINEAR":
        case "LINEAR":
            return linear(values, centre - 0.5, max(width - 1, 1e-9))  # 1 wide: a step
        case "LINEAR_EXACT":
            return linear(values, centre, width)
        case "SIGMOID":
            unit: Values = 1 / (1 + np.exp(np.clip(-4 * (values - centre) / width, -700, 700)))
            return unit
        case _:
            raise UnreadableImageError("DICOM with an unknown VOI LUT function")


def _looked_up(values: Values, found: Dataset) -> Values:
    """By the first of the file's VOI LUTs (PS3.3, C.11.2.1.1)."""
    from pydicom.pixels.processing import apply_voi

    entries, _, bits = (int(number) for number in found.VOILUTSequence[0].LUTDescriptor)
    if bits == 8 and not 0 < entries <= 256:  # pydicom counts places of such a table in 8 bits
        raise UnreadableImageError("DICOM with a VOI LUT of 8 bits and more than 256 entries")
    looked: Values = apply_voi(values.astype(np.int64), found) / ((1 << bits) - 1)
    return looked


def _stored_ends(found: Dataset) -> NDArray[np.int64]:
    """The least and the greatest value that the file's bits can hold."""
    bits, signed = int(found.BitsStored), int(found.PixelRepresentation)
    return np.array([-(1 << bits - 1), (1 << bits - 1) - 1] if signed else [0, (1 << bits) - 1])


def _colours(found: Dataset, kind: str) -> NDArray[Any]:
    """[H, W, 3]; pydicom turns YBR into RGB on the way."""
    from pydicom.pixels.processing import apply_color_lut

    array: NDArray[Any] = found.pixel_array
    if kind != "PALETTE COLOR":
        return array
    coloured = apply_color_lut(array, found)
    return coloured if coloured.dtype == np.uint8 else (coloured >> 8).astype(np.uint8)
