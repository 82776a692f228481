"""Read images for an exported model from a folder or an .npz, prepared as the run's sites prepare theirs.

A recipe with `fit = "exact"` does not define other sizes and colours. Here they are stretched to the model's size, grey
is repeated for RGB, and RGB becomes grey by ITU-R 601.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protofed.client.data import decoding, dicom, folder
from protofed.client.data.file_entry import UnreadableImageError as UnreadableError
from protofed.common.config.tables import Input
from protofed.common.errors import ConfigError, DataError
from protofed.common.version import install_hint

Pixels: TypeAlias = NDArray[np.float32]  # [channels, H, W], 0..1
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".gif", ".webp", ".jp2", ".dcm", ".dicom"})
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


def read_images(path: Path, input_: Input) -> Images:
    """The images of a folder (searched recursively, without hidden files) or of an .npz.

    Args:
        input_: the model's input settings.

    Raises:
        DataError: there are no images.
        ConfigError: no image file has the model's number of channels.
    """
    _check_pillow()
    if path.is_file() and path.suffix.lower() == ".npz":
        return ArchiveImages(path, prepared(input_))
    if not path.is_dir():
        raise DataError(f"there is no folder {path}; expected one with images, or an .npz file")
    if (channels := input_.shape[0]) not in MODES:
        raise ConfigError(f"the model takes images of {channels} channels, which image files do not have; give an .npz")
    tree = folder.walk(path)
    tree.check(path)
    files_found = [path / name for name in sorted(tree.files) if _is_image(path / name)]
    if not files_found:
        raise DataError(f"{path} has no images; expected files {', '.join(sorted(SUFFIXES))}, at any level")
    return FolderImages(path, files_found, prepared(input_))


def _is_image(file: Path) -> bool:
    """By its suffix; DICOM files often have none, so a file without one is opened."""
    try:
        return file.suffix.lower() in SUFFIXES or (not file.suffix and file.is_file() and dicom.is_dicom(file))
    except OSError:
        return True  # unreadable: keep it, so that it is reported


@dataclass(frozen=True)
class FolderImages:
    """The image files below one folder."""

    folder: Path
    files: Sequence[Path]
    input: Input

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        """The file's path relative to the folder."""
        return self.files[index].relative_to(self.folder).as_posix()

    def read(self, index: int) -> Pixels:
        """Decode the file as the run's sites do: float32 [channels, H, W] in 0..1."""
        return decoding.in_unit(decoding.decode(self.files[index], self.input))


class ArchiveImages:
    """One array of an .npz: uint8 or uint16 [N, H, W] or [N, H, W, channels], or floats in 0..1.

    The whole array is in memory: a compressed .npz cannot be read in part.

    Raises:
        DataError: the file cannot be read, or holds no such array.
    """

    def __init__(self, path: Path, input_: Input) -> None:
        self._stem, self._shape = path.name, input_.shape
        self._input = input_.model_copy(update={"window": None})  # arrays carry no units to which a window could apply
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
