"""NIfTI volumes by nibabel: `.nii` and `.nii.gz` of three dimensions and one value a voxel.

Axes are brought to the nearest anatomical ones (RAS). The slices are axial, from the feet to the head, and lie as in
DICOM: the first row is anterior, the first column is the patient's right.
"""

from __future__ import annotations

import gzip
import io
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protofed.client.data.file_entry import MAX_FILE_BYTES, MAX_PIXELS, UnreadableImageError
from protofed.client.data.grey_values import GreyWindow, float_image, scaled
from protofed.common.errors import DataError
from protofed.common.version import install_hint

if TYPE_CHECKING:
    from PIL.Image import Image

_GZIP = b"\x1f\x8b"
_HEADER_BYTES = 540  # of NIfTI-2, the longer one
_MAGIC = {b"n+1\0": slice(344, 348), b"n+2\0\r\n\x1a\n": slice(4, 12)}  # of NIfTI-1 and -2, and where it stands
_WHITE = {"uint8": 255.0, "uint16": 65535.0, "float32": 1.0, "float64": 1.0}  # without a window; as of TIFF files


def is_nifti(path: Path) -> bool:
    """Whether a file is NIfTI, compressed by gzip or not, by its content."""
    return _version(_start(path)) is not None


def count_slices(path: Path) -> int:
    """Number of slices, from the header.

    Raises:
        UnreadableImageError: it is no volume of one number a voxel.
        DataError: nibabel is not installed.
    """
    header = _header(path)
    return int(header.get_data_shape()[_geometry(header).axes[2]])


def read_layout(path: Path) -> tuple[int, tuple[int, int]]:
    """Bits of a value, and width and height of a slice, from the header.

    Raises:
        UnreadableImageError, DataError: as of `count_slices`.
    """
    header = _header(path)
    shape, (x, y, _) = header.get_data_shape(), _geometry(header).axes
    return 8 * header.get_data_dtype().itemsize, (int(shape[x]), int(shape[y]))


@contextmanager
def opened(path: Path, window: GreyWindow | None) -> Iterator[NiftiSlices]:
    """A volume; a compressed one is in memory, of others only the slices that are read.

    Raises:
        UnreadableImageError: it is no volume of one number a voxel, or too large.
        DataError: nibabel is not installed.
    """
    version, library = _version(_start(path)), _library()
    kind = library.Nifti1Image if version == 1 else library.Nifti2Image
    with path.open("rb") as file:
        stored = kind.from_stream(io.BytesIO(_inflated(file)) if _is_gzip(file) else file)
        yield NiftiSlices(stored, _geometry(stored.header), window)


@dataclass(frozen=True)
class Geometry:
    """How a volume lies in the patient.

    Attributes:
        axes: the stored axis of x (to the right), y (anterior) and z (superior), each the nearest one.
        flipped: whether values are stored against that direction.
    """

    axes: tuple[int, ...]
    flipped: tuple[bool, ...]


@dataclass(frozen=True)
class NiftiSlices:
    """The slices of a volume, a `volumes.Volume`.

    Attributes:
        stored: nibabel's image, whose values are still in the file.
    """

    stored: Any
    geometry: Geometry
    window: GreyWindow | None

    @property
    def count(self) -> int:
        """Number of slices."""
        return int(self.stored.shape[self.geometry.axes[2]])

    @property
    def several(self) -> str:
        """What is said where a run takes one image a file."""
        return f"a NIfTI volume of {self.count} slices; expected one image a file"

    def read(self, index: int) -> Image:
        """A slice as mode F in 0..1: by the window, or of values without slope and intercept by what their bits hold.

        Raises:
            UnreadableImageError: the values are no numbers, or need a window.
        """
        scaling = self.stored.header.get_slope_inter()
        white = _WHITE.get(self.stored.get_data_dtype().name) if scaling in ((None, None), (1.0, 0.0)) else None
        return float_image(scaled(self._plane(index), white, self.window))

    def _plane(self, index: int) -> NDArray[Any]:
        """[H, W]: rows to posterior, columns to the left."""
        (x, y, z), (to_left, to_posterior, to_feet) = self.geometry.axes, self.geometry.flipped
        where: list[int | slice] = [0] * len(self.stored.shape)  # axes beyond the third have one value
        where[x] = where[y] = slice(None)
        where[z] = self.count - 1 - index if to_feet else index
        plane = np.asarray(self.stored.dataobj[tuple(where)])
        plane = plane if y < x else plane.T  # [y, x]
        return plane[:: 1 if to_posterior else -1, :: 1 if to_left else -1]


def _header(path: Path) -> Any:
    """The header as nibabel has it; no more of the file is read."""
    start = _start(path)
    library = _library()
    kind = library.Nifti1Header if _version(start) == 1 else library.Nifti2Header
    return kind(start[: kind.sizeof_hdr])


def _geometry(header: Any) -> Geometry:
    """Check a header, and find the anatomical axes."""
    from nibabel import orientations

    shape = header.get_data_shape()
    if len(shape) < 3 or any(size != 1 for size in shape[3:]):
        raise UnreadableImageError(f"a NIfTI file of {len(shape)} dimensions; expected 3")
    if header.get_data_dtype().kind not in "iuf":
        raise UnreadableImageError("a NIfTI file of colours or complex numbers; expected one number a voxel")
    find_axes: Any = orientations.io_orientation
    found = find_axes(header.get_best_affine())  # [3, 2]: of each stored axis the anatomical one, and its sign
    if not np.isfinite(found).all():
        raise UnreadableImageError("a NIfTI file whose axes have no direction; expected a valid sform or qform")
    axes = tuple(found[:, 0].astype(int).tolist().index(axis) for axis in range(3))
    if math.prod(shape[axis] for axis in axes[:2]) > MAX_PIXELS:
        raise UnreadableImageError(f"slices of more than {MAX_PIXELS:,} pixels")
    return Geometry(axes, tuple(bool(found[axis, 1] < 0) for axis in axes))


def _library() -> Any:
    try:
        import nibabel
    except ModuleNotFoundError as error:
        raise DataError(f"NIfTI files need nibabel, which is not installed: {install_hint('nifti')}") from error
    logging.getLogger("nibabel.global").setLevel(logging.CRITICAL)  # its warnings quote the header
    return nibabel


def _start(path: Path) -> bytes:
    """The header's bytes, decompressed; fewer, if the file is shorter or no gzip after all."""
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
        if not start.startswith(_GZIP):
            return start
        file.seek(0)
        try:
            with gzip.GzipFile(fileobj=file) as inflated:
                return inflated.read(_HEADER_BYTES)
        except (OSError, EOFError):
            return b""


def _version(start: bytes) -> int | None:
    """1 or 2; None: this does not begin a NIfTI file."""
    versions = (number for number, (magic, place) in enumerate(_MAGIC.items(), 1) if start[place] == magic)
    return next(versions, None)


def _is_gzip(file: IO[bytes]) -> bool:
    start = file.read(len(_GZIP))
    file.seek(0)
    return start == _GZIP


def _inflated(file: IO[bytes]) -> bytes:
    with gzip.GzipFile(fileobj=file) as inflated:
        content = inflated.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise UnreadableImageError(f"larger than {MAX_FILE_BYTES >> 20} MiB after decompression")
    return content
