"""The order of a DICOM series, each slice in a file of its own: by its place in the patient, else by its number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protofed.client.data import dicom
from protofed.client.data.file_entry import UnreadableImageError
from protofed.client.data.volumes import MAX_FRAMES

if TYPE_CHECKING:
    from pydicom import Dataset

Stamped: TypeAlias = tuple[Path, int, int]  # a file, when it was changed (ns), its size in bytes
SERIES_TAGS = ["SeriesInstanceUID", "InstanceNumber", "ImagePositionPatient", "ImageOrientationPatient"]
_PARALLEL = 1e-3  # cosines of one series differ by rounding alone
_APART = 1e-3  # mm; slices that are nearer lie at one place: other times, echoes or directions of one slice


def sorted_slices(files: Sequence[Path]) -> Sequence[Path]:
    """The files in the order of their slices: of an axial series from the feet to the head.

    That is the order along the slices' normal. Where several slices lie at one place, or not all files say where they
    lie, the order is that of InstanceNumber.

    Raises:
        UnreadableImageError: a file is no DICOM, there are several series, or nothing gives an order.
    """
    if len(files) > MAX_FRAMES:
        raise UnreadableImageError(f"{len(files)} files in one folder; expected at most {MAX_FRAMES:,} slices")
    return _sorted(tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


@lru_cache(maxsize=64)  # where each slice is an example, the headers of all would be read for each
def _sorted(stamped: tuple[Stamped, ...]) -> Sequence[Path]:
    files = [file for file, _, _ in stamped]
    if not all(map(dicom.is_dicom, files)):
        raise UnreadableImageError("a folder with files that are no DICOM; expected the DICOM files of one series")
    headers = [dicom.read_elements(file, SERIES_TAGS, stop_before_pixels=True) for file in files]
    return [files[place] for place in slice_order(headers)]


def slice_order(headers: Sequence[Dataset]) -> Sequence[int]:
    """The places of these headers, which have `SERIES_TAGS`, in the order of their slices.

    Raises:
        UnreadableImageError: there are several series, or nothing gives an order.
    """
    if len({header.get("SeriesInstanceUID") for header in headers}) > 1:
        raise UnreadableImageError("a folder with several DICOM series; expected a folder for each")
    places = _along_normal(headers)
    order: list[int] = np.argsort(_numbers(headers) if places is None else places).tolist()
    return order


def _along_normal(headers: Sequence[Dataset]) -> NDArray[np.float64] | None:
    """Each slice's place along the normal [n], in mm; None: unknown, or several slices have one place.

    Raises:
        UnreadableImageError: the slices are not parallel, as a series with a localiser is.
    """
    if any(not header.get("ImagePositionPatient") or not header.get("ImageOrientationPatient") for header in headers):
        return None
    cosines = np.array([header.ImageOrientationPatient for header in headers], np.float64)  # [n, 6]: of rows, columns
    if np.abs(cosines - cosines[0]).max() > _PARALLEL:
        raise UnreadableImageError("a DICOM series whose slices are not parallel; expected one volume")
    normal = np.cross(cosines[0, :3], cosines[0, 3:])
    places = np.array([header.ImagePositionPatient for header in headers], np.float64) @ normal
    return places if np.diff(np.sort(places)).min() > _APART else None


def _numbers(headers: Sequence[Dataset]) -> NDArray[np.float64]:
    """Each slice's InstanceNumber [n].

    Raises:
        UnreadableImageError: some have none, or one that another has, too.
    """
    numbers = [header.get("InstanceNumber") for header in headers]
    if None in numbers or len(set(numbers)) < len(numbers):
        raise UnreadableImageError(
            "a DICOM series without an order: some files lack ImagePositionPatient with ImageOrientationPatient, or "
            "share it, and some lack InstanceNumber, or share it"
        )
    return np.array(numbers, np.float64)
