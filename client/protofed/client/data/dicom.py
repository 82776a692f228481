"""DICOM files by pydicom. Only the elements that pixels need are read: nothing that identifies a patient.

A file has one frame or several. The files of a folder may be the slices of one series: see `series`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protofed.client.data.file_entry import MAX_PIXELS, UnreadableImageError
from protofed.client.data.grey_values import GreyWindow, float_image, linear
from protofed.common.errors import DataError
from protofed.common.version import install_hint

if TYPE_CHECKING:
    from PIL.Image import Image
    from pydicom import Dataset
    from pydicom.uid import UID

Values = NDArray[Any]  # [H, W], in the file's own units, such as Hounsfield units
_TAGS = [
    *("Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelData", "ExtendedOffsetTable"),
    *("ExtendedOffsetTableLengths", "RescaleSlope", "RescaleIntercept", "ModalityLUTSequence", "VOILUTSequence"),
    *("WindowCenter", "WindowWidth", "VOILUTFunction", "SharedFunctionalGroupsSequence"),
    "PerFrameFunctionalGroupsSequence",
    *(
        f"{colour}PaletteColorLookupTable{part}"
        for colour in ("Red", "Green", "Blue")
        for part in ("Descriptor", "Data")
    ),
    *(f"Segmented{colour}PaletteColorLookupTableData" for colour in ("Red", "Green", "Blue")),
]
# Lossless JPEG, JPEG-LS and JPEG of 12 bits. Only pylibjpeg-libjpeg decodes them; its licence, the GPL, is not ours.
_BY_LIBJPEG = frozenset(f"1.2.840.10008.1.2.4.{end}" for end in (51, 57, 70, 80, 81))
FRAME_TAGS = ["NumberOfFrames", "PerFrameFunctionalGroupsSequence"]
_DEFLATED = "1.2.840.10008.1.2.1.99"
# The first element of a file without a preamble: of group 2 or 8, with a VR or (implicit) a length below 65536.
_BARE = re.compile(rb"[\x02\x08]\0.\0(?:[A-Z]{2}|..\0\0)|\0[\x02\x08]\0.[A-Z]{2}", re.DOTALL)
# Of an enhanced image these are in sequences for the frame, and in those that all frames share.
_IN_GROUPS = {
    "PixelValueTransformationSequence": ("RescaleSlope", "RescaleIntercept"),
    "FrameVOILUTSequence": ("WindowCenter", "WindowWidth", "VOILUTFunction"),
}
_MAY_BE_EMPTY = (
    "RescaleSlope",
    "RescaleIntercept",
    "ModalityLUTSequence",
    "VOILUTSequence",
    *sum(_IN_GROUPS.values(), ()),
)
_RGB = ("RGB", "YBR_FULL", "YBR_FULL_422")
_RGB_BY_JPEG_2000 = ("YBR_ICT", "YBR_RCT")  # its decoders give RGB; elsewhere nothing converts them


def is_dicom(path: Path) -> bool:
    """Whether a file is DICOM: 128 bytes of preamble, then `DICM` (PS3.10, 7.1); or it begins with an element."""
    with path.open("rb") as file:
        start = file.read(132)
    return _has_preamble(start) or _BARE.match(start) is not None


def _has_preamble(start: bytes) -> bool:
    return start[128:] == b"DICM"


@dataclass(frozen=True)
class DicomFrames:
    """The frames of a DICOM file, a `volumes.Volume`. They are in memory as they are stored, compressed or not.

    Grey values are rescaled by the file's slope and intercept, then windowed. The window is the run's, else the file's
    own VOI LUT or first window, else all that its bits can hold. MONOCHROME1 is inverted.
    """

    dataset: Dataset
    window: GreyWindow | None
    several: str = "DICOM of several frames; expected one image a file"

    @property
    def count(self) -> int:
        """Number of frames."""
        return frame_count(self.dataset)

    def read(self, index: int) -> Image:
        """Decode one frame; returns mode F (grey) in 0..1, or RGB of 8 bits.

        Raises:
            UnreadableImageError: a compression without a decoder, or more than 8 bits of colour.
        """
        from PIL import Image

        dataset = _of_frame(self.dataset, index)
        kind = str(dataset.PhotometricInterpretation)
        if kind in ("MONOCHROME1", "MONOCHROME2"):
            plane = _unit(dataset, self.window)
            return float_image(1 - plane if kind == "MONOCHROME1" else plane)
        return Image.fromarray(_palette_colours(dataset) if kind == "PALETTE COLOR" else _colours(dataset, kind))


def open_frames(path: Path, window: GreyWindow | None) -> DicomFrames:
    """Open a file, after all checks that need no pixels.

    Args:
        window: the run's centre and width, in rescaled units.

    Raises:
        UnreadableImageError: no image, or one that is too large.
        DataError: pydicom is not installed.
    """
    return open_dataset(read_elements(path, _TAGS), window)


def open_dataset(dataset: Dataset, window: GreyWindow | None) -> DicomFrames:
    """As `open_frames`, of a file that was read into memory."""
    if "PixelData" not in dataset:
        raise UnreadableImageError("DICOM without an image")
    if any(name not in dataset for name in ("Rows", "Columns", "PhotometricInterpretation", "BitsStored")):
        raise UnreadableImageError("DICOM whose image has no size, colours or depth")
    if dataset.Rows * dataset.Columns > MAX_PIXELS:
        raise UnreadableImageError(f"{dataset.Columns} x {dataset.Rows} pixels; expected at most {MAX_PIXELS:,}")
    return DicomFrames(dataset, window)


def count_frames(path: Path) -> int:
    """Number of frames, without reading the pixels."""
    return frame_count(read_elements(path, FRAME_TAGS, stop_before_pixels=True))


def frame_count(dataset: Dataset) -> int:
    """Number of frames by the header."""
    return max(int(dataset.get("NumberOfFrames") or 1), len(dataset.get("PerFrameFunctionalGroupsSequence") or []))


def read_elements(path: Path, tags: list[str], *, stop_before_pixels: bool = False) -> Dataset:
    """The elements with these keywords; of functional groups all, of which `_of_frame` drops what pixels need not.

    Raises:
        UnreadableImageError: the file is deflated.
        DataError: pydicom is not installed.
    """
    pydicom = _library()
    with path.open("rb") as file:
        file.seek(132 if _has_preamble(file.read(132)) else 0)
        meta = pydicom.filereader.read_dataset(file, False, True, stop_when=lambda tag, *_: tag.group != 2)
    if meta.get("TransferSyntaxUID") == _DEFLATED:  # pydicom would inflate it, however large, before any check
        raise UnreadableImageError("a deflated DICOM file; expected another transfer syntax")
    dataset: Dataset = pydicom.dcmread(path, stop_before_pixels=stop_before_pixels, specific_tags=tags, force=True)
    return dataset


def _check_syntax(dataset: Dataset) -> None:
    """Check that pydicom can decode the pixels; a file that does not say how it is encoded is as pydicom reads it."""
    from pydicom import uid

    if "TransferSyntaxUID" not in dataset.file_meta:
        if dataset["PixelData"].is_undefined_length:
            raise UnreadableImageError("DICOM that does not say how it is compressed; expected a transfer syntax")
        implicit, little = dataset.original_encoding
        explicit = uid.ExplicitVRLittleEndian if little else uid.ExplicitVRBigEndian
        dataset.file_meta.TransferSyntaxUID = uid.ImplicitVRLittleEndian if implicit else explicit
    syntax = dataset.file_meta.TransferSyntaxUID
    if syntax.is_compressed and not _library().pixels.get_decoder(syntax).is_available:
        raise UnreadableImageError(
            f"DICOM compressed as {syntax.name}, for which pydicom has no decoder here: install {_decoders(syntax)}, "
            "or decompress the file"
        )


def _decoders(syntax: UID) -> str:
    """The package that decodes a compression, and the extra that installs it."""
    return "pylibjpeg-libjpeg (extra dicom-jpeg)" if syntax in _BY_LIBJPEG else "pylibjpeg (extra dicom)"


def _of_frame(dataset: Dataset, index: int) -> Dataset:
    """One frame's elements, the values shared with `dataset`: what an enhanced image says of a frame where others do.

    Elements without a value are dropped.

    Raises:
        UnreadableImageError: pydicom cannot decode the frame's pixels.
    """
    from pydicom import Dataset

    _check_syntax(dataset)
    frame = Dataset({tag: dataset.get_item(tag) for tag in dataset.keys()})  # noqa: SIM118 - iterating gives elements
    frame.file_meta = dataset.file_meta
    implicit, little = dataset.original_encoding
    frame.set_original_encoding(implicit, little, dataset.original_character_set)
    for group in _groups(frame, index):
        for sequence, names in _IN_GROUPS.items():
            for item in _first(group, sequence):
                for name in filter(item.__contains__, names):
                    frame.add(item[name])
    for name in _MAY_BE_EMPTY:
        if name in frame and frame[name].is_empty:
            del frame[name]
    if not all("LUTDescriptor" in item and "LUTData" in item for item in _first(frame, "VOILUTSequence")):
        del frame.VOILUTSequence
    frame.pixel_array_options(index=index, correct_unused_bits=not _is_moved(frame))
    return frame


def _groups(frame: Dataset, index: int) -> list[Dataset]:
    """The functional groups that all frames share, then those of this one; they are taken out of `frame`."""
    own = list(frame.get("PerFrameFunctionalGroupsSequence") or [])
    if own and len(own) != int(frame.get("NumberOfFrames") or 1):
        raise UnreadableImageError("DICOM whose number of frames is not that of its functional groups")
    groups = [*_first(frame, "SharedFunctionalGroupsSequence"), *own[index : index + 1]]
    for name in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"):
        frame.pop(name, None)
    return groups


def _first(dataset: Dataset, sequence: str) -> list[Dataset]:
    """The first item of a sequence, if there is one."""
    return list(dataset.get(sequence) or [])[:1]


def _library() -> Any:
    try:
        import pydicom
        import pydicom.pixels
    except ModuleNotFoundError as error:
        raise DataError(f"DICOM files need pydicom, which is not installed: {install_hint('dicom')}") from error
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)  # its warnings quote the content of elements
    return pydicom


def _is_moved(dataset: Dataset) -> bool:
    """Whether an old writer did not store values in the lowest bits; pydicom takes those, whatever HighBit says."""
    return int(dataset.HighBit) != int(dataset.BitsStored) - 1


def _stored(dataset: Dataset) -> Values:
    """The stored values [H, W] or [H, W, 3], of `BitsStored` bits; colours as RGB."""
    allocated, stored, high = int(dataset.BitsAllocated), int(dataset.BitsStored), int(dataset.HighBit)
    syntax, moved = dataset.file_meta.TransferSyntaxUID, _is_moved(dataset)
    if moved and (syntax.is_compressed or not stored <= high + 1 <= allocated):
        raise UnreadableImageError("DICOM whose HighBit does not match its BitsStored; expected BitsStored - 1")
    try:
        cells: Values = dataset.pixel_array
    except RuntimeError as error:
        if not syntax.is_compressed:
            raise
        raise UnreadableImageError(
            f"DICOM compressed as {syntax.name}, which no decoder here can decode: it is damaged, or needs "
            f"{_decoders(syntax)}"
        ) from error
    return cells << (allocated - 1 - high) >> (allocated - stored) if moved else cells


def _unit(dataset: Dataset, window: GreyWindow | None) -> NDArray[np.float32]:
    """Grey values [H, W] in 0..1."""
    values, low, high = _rescaled(dataset)
    if window is not None:
        unit = linear(values, *window)
    elif "VOILUTSequence" in dataset:
        unit = _by_voi_table(values, dataset, signed=low < 0)
    elif dataset.get("WindowCenter") is not None:
        unit = _own_window(values, dataset)
    else:
        unit = linear(values, (low + high) / 2, high - low)
    if not np.isfinite(unit).all():
        raise UnreadableImageError("DICOM whose window or range is no number")
    return unit.clip(0, 1).astype(np.float32)


def _rescaled(dataset: Dataset) -> tuple[Values, float, float]:
    """Values [H, W] by the file's modality LUT or slope and intercept, and the range that its bits can represent."""
    from pydicom.pixels.processing import apply_modality_lut

    stored = _stored(dataset)
    if "ModalityLUTSequence" in dataset:
        entries, first, bits = _descriptor(dataset.ModalityLUTSequence[0].LUTDescriptor)
        if bits not in (8, 16):
            raise UnreadableImageError("DICOM with a modality LUT of other than 8 or 16 bits")
        table = apply_modality_lut(np.arange(first, first + entries), dataset)
        return _looked_up(stored, first, table), 0, (1 << bits) - 1
    if ("RescaleSlope" in dataset) != ("RescaleIntercept" in dataset):  # pydicom would take neither
        raise UnreadableImageError("DICOM with only one of a rescale slope and intercept; expected both, or neither")
    low, high = sorted(float(end) for end in apply_modality_lut(_stored_ends(dataset), dataset))
    return apply_modality_lut(stored, dataset), low, high


def _descriptor(numbers: Sequence[int]) -> tuple[int, int, int]:
    """Number of entries, the value of the first one, and bits of an entry (PS3.3, C.11.1.1.1); 0 entries are 65536."""
    entries, first, bits = (int(number) for number in numbers)
    return entries or 1 << 16, first, bits


def _looked_up(values: Values, first: int, table: NDArray[Any]) -> NDArray[Any]:
    """Values [H, W] in a table [entries, ...]; those beyond an end get that end's entry.

    pydicom looks values up in the table's own integers, where those far beyond an end wrap. So it only reads the table.
    """
    return table[np.clip(values.astype(np.float64) - first, 0, len(table) - 1).astype(np.intp)]


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


def _by_voi_table(values: Values, dataset: Dataset, *, signed: bool) -> Values:
    """Values [H, W] through the first of the file's VOI LUTs (PS3.3, C.11.2.1.1).

    Args:
        signed: the values may be negative.
    """
    from pydicom.pixels.processing import apply_voi

    entries, first, bits = _descriptor(dataset.VOILUTSequence[0].LUTDescriptor)
    if bits not in (8, *range(10, 17)) or (bits == 8 and entries > 256):  # pydicom indexes 8 bits with 8 bits
        raise UnreadableImageError(
            "DICOM with a VOI LUT of other than 8 or 10 to 16 bits, or of 8 and over 256 entries"
        )
    table = apply_voi(np.arange(first, first + entries), dataset) / ((1 << bits) - 1)
    if signed and first >= 1 << 15:  # a negative first value, read as one without a sign
        first -= 1 << 16
    return _looked_up(values, first, table)


def _stored_ends(dataset: Dataset) -> NDArray[np.int64]:
    """[2]: the smallest and the largest value that the file's bits can represent."""
    bits, signed = int(dataset.BitsStored), int(dataset.PixelRepresentation)
    return np.array([-(1 << bits - 1), (1 << bits - 1) - 1] if signed else [0, (1 << bits) - 1])


def _colours(dataset: Dataset, kind: str) -> NDArray[np.uint8]:
    """[H, W, 3], RGB; pydicom converts YBR on the way."""
    from pydicom.uid import JPEG2000TransferSyntaxes

    jpeg_2000 = dataset.file_meta.TransferSyntaxUID in JPEG2000TransferSyntaxes
    if kind not in (*_RGB, *(_RGB_BY_JPEG_2000 if jpeg_2000 else ())):
        raise UnreadableImageError(f"DICOM in colours other than {', '.join(_RGB)} or PALETTE COLOR")
    if int(dataset.BitsAllocated) != 8 or int(dataset.BitsStored) != 8:
        raise UnreadableImageError(f"DICOM in {kind} with {dataset.BitsStored} bits a colour; expected 8")
    return _stored(dataset)


def _palette_colours(dataset: Dataset) -> NDArray[np.uint8]:
    """[H, W, 3], RGB, of 8 bits. Where all of a palette is below 256 its 16 bits hold 8, as of some old writers."""
    from pydicom.pixels.processing import apply_color_lut

    if not dataset.original_encoding[1]:
        raise UnreadableImageError("DICOM in PALETTE COLOR and big endian; expected little endian")
    entries, first, _ = _descriptor(dataset.RedPaletteColorLookupTableDescriptor)
    table = apply_color_lut(np.arange(first, first + entries), dataset)
    if table.dtype == np.uint8 and entries > 256:  # pydicom indexes 8 bits with 8 bits
        raise UnreadableImageError("DICOM with a palette of 8 bits and more than 256 entries; expected 16 bits")
    if table.max() > 255:
        table >>= 8
    return _looked_up(_stored(dataset), first, table.astype(np.uint8))
