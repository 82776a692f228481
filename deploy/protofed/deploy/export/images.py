"""Read images for an exported model, listed and decoded by the functions that read a site's own.

A recipe with `fit = "exact"` does not define other sizes and colours. Here they are stretched to the model's size, grey
is repeated for RGB, and RGB becomes grey by ITU-R 601.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protofed.client.data import decoding, folder, image_files
from protofed.client.data.file_entry import FileEntry
from protofed.client.data.file_entry import UnreadableImageError as UnreadableError
from protofed.common import plugins
from protofed.common.config.data import Data
from protofed.common.config.tables import Input
from protofed.common.config.transforms import is_shipped
from protofed.common.errors import ConfigError, DataError
from protofed.common.version import install_hint

Pixels: TypeAlias = NDArray[np.float32]  # [channels, H, W], 0..1
KEYS = ("images", "test_images")  # names of the array in an .npz; the first one found is used
MODES = {1: "L", 3: "RGB"}  # number of channels -> Pillow's mode
_FOREIGN = (OSError, ValueError, TypeError, SyntaxError, EOFError, IndexError, zlib.error)


@dataclass(frozen=True)
class UnreadableFile:
    """An image that could not be read, and the reason."""

    path: str
    why: str


def prepared(input_: Input) -> Input:
    """The run's input settings, changed to accept images of other sizes and colours."""
    fit = "stretch" if input_.fit == "exact" else input_.fit
    return input_.model_copy(update={"fit": fit, "colours": "convert"})


class Images(Protocol):
    """A sequence of images, read one at a time."""

    def __len__(self) -> int:
        """The number of images."""

    def name(self, index: int) -> str:
        """The image's name in the output table."""

    def read(self, index: int) -> Pixels:
        """The image as the model's input: float32 [channels, H, W] in 0..1.

        Raises:
            UnreadableError: the file is damaged or of an unknown format.
        """


@dataclass(frozen=True)
class ImageSource:
    """Where images to be classified are.

    Attributes:
        path: a folder, a .csv with a column `path`, one image, or an .npz.
        series: of a folder: the files of each folder in it, and its own, are one volume.
        tile_size: of a .csv: side of the square tile at a row's columns x and y.
    """

    path: Path
    series: bool = False
    tile_size: int | None = None


def read_images(source: ImageSource, input_: Input, allowed: Set[str] = frozenset()) -> Images:
    """The images of a source, listed by the functions that list a site's.

    Args:
        input_: the model's input settings. Their rule `frames` says which images a file gives.
        allowed: plug-ins that may prepare them.

    Raises:
        DataError: there are no images, or a library is not installed that they need.
        ConfigError: no image file has the model's number of channels, an option is of another source, or what
            prepares the images is not installed or not allowed.
    """
    _check_pillow()
    _check_options(source)
    input_ = prepared(input_)
    if source.path.is_file() and _suffix(source) == ".npz":
        return ArchiveImages(source.path, input_)
    if (channels := input_.shape[0]) not in MODES:
        raise ConfigError(f"the model takes images of {channels} channels, which image files do not have; give an .npz")
    _check_preparation(input_, allowed)
    images = list(image_files.expand_parts(_list_entries(source), input_.frames))
    if not images:
        raise DataError(f"{source.path} has no images; expected image files at any level, or a row for each in a .csv")
    return FileImages(images, input_)


def _list_entries(source: ImageSource) -> list[FileEntry]:
    path = source.path
    if path.is_dir():
        return folder.read_unlabelled(path, series=source.series)
    if not path.is_file():
        raise DataError(f"there is no file or folder {path}; expected images, a .csv that lists them, or an .npz")
    if _suffix(source) != ".csv":
        return [FileEntry(path, path.name, label="")]
    data = Data(source="manifest", root=path, tile_size=source.tile_size)
    entries = image_files.read_manifest(path, data, labelled=False)
    if ambiguous := [entry.row for entry in entries if entry.ambiguous]:
        raise DataError(
            f"{path}, row {ambiguous[0]}: several files below its folder have this name; expected one. Write the "
            "path with its folders"
        )
    return entries


def _check_options(source: ImageSource) -> None:
    if source.series and not source.path.is_dir():
        raise ConfigError(
            f"--series is for a folder, and {source.path} is none; remove it. In a .csv the path of a row may be the "
            "folder of a series"
        )
    if source.tile_size is not None and (source.path.is_dir() or _suffix(source) != ".csv"):
        raise ConfigError(f"--tile-size is for a .csv with columns path, x and y, and {source.path} is none; remove it")


def _suffix(source: ImageSource) -> str:
    return source.path.suffix.lower()


def _check_preparation(input_: Input, allowed: Set[str]) -> None:
    """Make the transforms of `input.prepare` ready before any image is read: what they lack is no image's fault."""
    names = [step.transform for step in input_.prepare]
    if not names:
        return
    if foreign := [name for name in names if not is_shipped(name) and name not in allowed]:
        raise ConfigError(
            f"the model's images are prepared by the code {foreign[0]}, which is not part of protofed. If you trust "
            f"this code and it is installed here, add --allow-plugin {foreign[0]}"
        )
    plugins.allow(allowed)
    try:
        from protofed.client.data.preparation import Preparation
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the model's images are prepared by {', '.join(names)}, and PyTorch is not installed: "
            f"{install_hint('client')}"
        ) from error
    Preparation.of(input_)


@dataclass(frozen=True)
class FileImages:
    """Image files, or frames or tiles of them."""

    entries: Sequence[FileEntry]
    input: Input

    def __len__(self) -> int:
        return len(self.entries)

    def name(self, index: int) -> str:
        """The file's path below the folder, or as in the .csv, and its part, as "a/b.dcm, frame 12"."""
        return self.entries[index].name

    def read(self, index: int) -> Pixels:
        """Decode the image as the run's sites do: float32 [channels, H, W] in 0..1."""
        entry = self.entries[index]
        return decoding.in_unit(decoding.decode(entry.path, self.input, entry.part))


class ArchiveImages:
    """One array of an .npz: uint8 or uint16 [N, H, W] or [N, H, W, channels], or floats in 0..1.

    The whole array is in memory: a compressed .npz cannot be read in part.

    Raises:
        DataError: the file cannot be read, or holds no such array.
    """

    def __init__(self, path: Path, input_: Input) -> None:
        self._stem, self._shape = path.name, input_.shape
        # Arrays carry no units to which a window could apply, and a run's arrays are not prepared.
        self._input = input_.model_copy(update={"window": None, "prepare": ()})
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                key = next((key for key in KEYS if key in archive), None)
                array_names = sorted(archive)
                array = archive[key] if key else None
        except (*_FOREIGN, zipfile.BadZipFile) as error:
            raise DataError(f"cannot read {path} ({error}); expected an .npz of plain arrays") from error
        if array is None:
            raise DataError(
                f"{path} holds {', '.join(array_names) or 'nothing'}; expected an array {' or '.join(KEYS)}"
            )
        if (
            array.ndim not in (3, 4)
            or not len(array)
            or array.dtype.name not in ("uint8", "uint16", "float32", "float64")
        ):
            raise DataError(
                f"{path}: {key} is {array.dtype} of shape {list(array.shape)}; expected uint8, uint16 or floats in "
                "0..1, [N, height, width] or [N, height, width, channels]"
            )
        self._array = array if array.ndim == 4 else array[..., None]

    def __len__(self) -> int:
        return len(self._array)

    def name(self, index: int) -> str:
        """The file's name and the image's index."""
        return f"{self._stem}#{index}"

    def read(self, index: int) -> Pixels:
        """The image as float32 [channels, H, W] in 0..1, converted if its channels or size are not the model's."""
        from PIL import Image

        image = self._array[index]  # [H, W, channels]
        floats = image.dtype.kind == "f"
        if floats and not (np.isfinite(image).all() and image.min() >= 0 and image.max() <= 1):
            raise UnreadableError("values outside 0..1")
        if image.shape[2] == self._shape[0] and image.shape[:2] == self._shape[1:]:
            return decoding.in_unit(np.moveaxis(image, 2, 0))
        if image.shape[2] == 1 and image.dtype != np.uint8:
            deep = image[..., 0] if floats else image[..., 0] / np.iinfo(image.dtype).max
            return decoding.in_unit(decoding.fit_to_input(Image.fromarray(deep.astype(np.float32)), self._input))
        if image.dtype != np.uint8 or image.shape[2] not in MODES or self._shape[0] not in MODES:
            expected = [*self._shape[1:], self._shape[0]]
            raise UnreadableError(f"{image.dtype} of shape {list(image.shape)}; expected {expected}, or uint8")
        plane = image[..., 0] if image.shape[2] == 1 else image
        return decoding.in_unit(decoding.fit_to_input(Image.fromarray(plane), self._input))


def batches(
    images: Images, shape: tuple[int, int, int], size: int
) -> Iterator[tuple[list[str], NDArray[np.float32], list[UnreadableFile]]]:
    """Names and pixels [B, channels, H, W] of so many images at a time, and those among them that cannot be read."""
    for first in range(0, len(images), size):
        names, read, unreadable = list[str](), list[Pixels](), list[UnreadableFile]()
        for index in range(first, min(first + size, len(images))):
            try:
                read.append(images.read(index))
                names.append(images.name(index))
            except UnreadableError as error:
                unreadable.append(UnreadableFile(images.name(index), str(error)))
        pixels = np.stack(read) if read else np.zeros((0, *shape), dtype=np.float32)
        yield names, pixels, unreadable


def _check_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"Pillow is not installed, which reads images: {install_hint('export')}") from error
