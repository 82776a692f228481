"""DICOM files by pydicom. Only the elements that pixels need are read: nothing that identifies a patient."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protofed.client.data.image_error import MOST_PIXELS, UnreadableImageError
from protofed.common.errors import DataError
from protofed.common.version import install_hint

if TYPE_CHECKING:
    from PIL.Image import Image
    from pydicom import Dataset

Values = NDArray[Any]  # [H, W], in the file's own units, such as Hounsfield units
_TAGS = [
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


def is_dicom(path: Path) -> bool:
    """Whether a file is DICOM: 128 bytes of preamble, then `DICM` (PS3.10, 7.1)."""
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def read(path: Path, window: tuple[float, float] | None) -> Image:
    """Read a file of one image; returns mode F (grey) in 0..1, or RGB of 8 bits.

    Grey values are rescaled by the file's slope and intercept, then windowed by the run's window, else the file's own
    VOI LUT or window (the first), else by all that its bits can hold; MONOCHROME1 is inverted.

    Args:
        window: the run's centre and width, in rescaled units.

    Raises:
        UnreadableImageError: no image, several frames, a compression without a decoder, more than 8 bits of colour.
        DataError: pydicom is not installed.
    """
    from PIL import Image

    dataset = _checked(path)
    kind = str(dataset.PhotometricInterpretation)
    if kind in ("MONOCHROME1", "MONOCHROME2"):
        plane = _unit(dataset, window)
        return Image.fromarray(1 - plane if kind == "MONOCHROME1" else plane)
    array = _colours(dataset, kind)
    if array.dtype != np.uint8 or array.ndim != 3:
        raise UnreadableImageError(f"DICOM in {kind} with {array.dtype} values; expected 8 bits a colour")
    return Image.fromarray(array)


def _checked(path: Path) -> Dataset:
    """The elements of `_TAGS`, after all checks that need no pixels."""
    pydicom = _library()
    meta = pydicom.filereader.read_file_meta_info(path)
    if meta.TransferSyntaxUID == _DEFLATED:  # pydicom would inflate all of it, however large, before any check
        raise UnreadableImageError("a deflated DICOM file; expected another transfer syntax")
    dataset: Dataset = pydicom.dcmread(path, specific_tags=_TAGS)
    if "PixelData" not in dataset:
        raise UnreadableImageError("DICOM without an image")
    if int(dataset.get("NumberOfFrames") or 1) != 1 or "PerFrameFunctionalGroupsSequence" in dataset:
        raise UnreadableImageError("DICOM of several frames; expected one image a file")
    if dataset.Rows * dataset.Columns > MOST_PIXELS:
        raise UnreadableImageError(f"{dataset.Columns} x {dataset.Rows} pixels; expected at most {MOST_PIXELS:,}")
    syntax = meta.TransferSyntaxUID
    if syntax.is_compressed and not pydicom.pixels.get_decoder(syntax).is_available:
        raise UnreadableImageError(f"DICOM compressed as {syntax.name}, for which pydicom has no decoder here")
    return dataset


def _library() -> Any:
    try:
        import pydicom
        import pydicom.pixels
    except ModuleNotFoundError as error:
        raise DataError(f"DICOM files need pydicom, which is not installed: {install_hint('dicom')}") from error
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)  # its warnings quote the content of elements
    return pydicom


def _unit(dataset: Dataset, window: tuple[float, float] | None) -> NDArray[np.float32]:
    """Grey values [H, W] in 0..1."""
    from pydicom.pixels.processing import apply_modality_lut

    values = apply_modality_lut(dataset.pixel_array, dataset)
    if window is not None:
        unit = linear(values, *window)
    elif "VOILUTSequence" in dataset:
        unit = _by_lookup_table(values, dataset)
    elif dataset.get("WindowCenter") is not None:
        unit = _own_window(values, dataset)
    else:
        low, high = sorted(float(end) for end in apply_modality_lut(_stored_ends(dataset), dataset))
        unit = linear(values, (low + high) / 2, high - low)
    if not np.isfinite(unit).all():
        raise UnreadableImageError("DICOM whose window or range is no number")
    return unit.clip(0, 1).astype(np.float32)


def linear(values: Values, centre: float, width: float) -> Values:
    """Map the window to 0..1, the rest beyond: (values - centre) / width + 1/2 (LINEAR_EXACT, PS3.3 C.11.2.1.3.2)."""
    unit: Values = (values.astype(np.float64) - centre) / width + 0.5
    return unit


def _own_window(values: Values, dataset: Dataset) -> Values:
    """The first of the file's windows, by its own function (PS3.3, C.11.2.1.2 and C.11.2.1.3)."""
    if dataset.get("WindowWidth") is None:
        raise UnreadableImageError("DICOM with a window's centre and no width")
    centre, width = (float(np.atleast_1d(dataset[name].value)[0]) for name in ("WindowCenter", "WindowWidth"))
    function = dataset.get("VOILUTFunction") or "LINEAR"
    if not (width >= 1 if function == "LINEAR" else width > 0):
        raise UnreadableImageError("DICOM with a window of a width that its function does not allow")
    match function:
        case "LINEAR":
            return linear(values, centre - 0.5, max(width - 1, 1e-9))  # of width 1 it is a step
        case "LINEAR_EXACT":
            return linear(values, centre, width)
        case "SIGMOID":
            # exp of more than 709 overflows; at 700 the result is 0 or 1 anyway
            unit: Values = 1 / (1 + np.exp(np.clip(-4 * (values - centre) / width, -700, 700)))
            return unit
        case _:
            raise UnreadableImageError("DICOM with an unknown VOI LUT function")


def _by_lookup_table(values: Values, dataset: Dataset) -> Values:
    """Values [H, W] through the first of the file's VOI LUTs (PS3.3, C.11.2.1.1)."""
    from pydicom.pixels.processing import apply_voi

    entries, _, bits = (int(number) for number in dataset.VOILUTSequence[0].LUTDescriptor)
    if bits == 8 and not 0 < entries <= 256:  # pydicom indexes such a table with 8 bits
        raise UnreadableImageError("DICOM with a VOI LUT of 8 bits and more than 256 entries")
    unit: Values = apply_voi(values.astype(np.int64), dataset) / ((1 << bits) - 1)
    return unit


def _stored_ends(dataset: Dataset) -> NDArray[np.int64]:
    """[2]: the smallest and the largest value that the file's bits can represent."""
    bits, signed = int(dataset.BitsStored), int(dataset.PixelRepresentation)
    return np.array([-(1 << bits - 1), (1 << bits - 1) - 1] if signed else [0, (1 << bits) - 1])


def _colours(dataset: Dataset, kind: str) -> NDArray[Any]:
    """[H, W, 3], RGB; pydicom converts YBR on the way, and a palette is applied here."""
    from pydicom.pixels.processing import apply_color_lut

    array: NDArray[Any] = dataset.pixel_array
    if kind != "PALETTE COLOR":
        return array
    coloured = apply_color_lut(array, dataset)
    return coloured if coloured.dtype == np.uint8 else (coloured >> 8).astype(np.uint8)
