"""Images for an exported model, from a folder or an .npz, brought to the model's channels and size by Pillow.

Grey images become RGB by repetition, RGB ones grey by ITU-R 601; transparency is dropped, a photograph is turned as its
EXIF says, of several pages the first counts. Other sizes are stretched to the model's (bilinear, antialiased): nothing
is cropped, and proportions are not kept. Eight bits are divided by 255, sixteen by 65535.
"""

from __future__ import annotations

import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protofed.common.errors import ConfigError, DataError

Pixels: TypeAlias = NDArray[np.float32]  # [channels, H, W], 0..1
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff"})
KEYS = ("images", "test_images")  # of an .npz, the first that is there
MODES = {1: "L", 3: "RGB"}  # Pillow's names by channels
_FOREIGN = (OSError, ValueError, TypeError, SyntaxError, EOFError, IndexError, zlib.error, Warning)


@dataclass(frozen=True)
class Unreadable:
    """An image that could not be read, and why."""

    path: str
    why: str


class Images(Protocol):
    """Images by number."""

    def __len__(self) -> int:
        """How many there are."""

    def name(self, index: int) -> str:
        """What the table calls one."""

    def read(self, index: int) -> Any:
        """One of them as Pillow's image, or as an array [channels, H, W] of the model's size; any of `_FOREIGN`."""


def images_of(path: Path, shape: tuple[int, int, int]) -> Images:
    """The images of a folder (all levels, hidden files left out) or of an .npz.

    Args:
        shape: channels, height and width of the model.

    Raises:
        DataError: there are none.
        ConfigError: the model's channels are not those of any image file.
    """
    pillow()
    if path.is_file() and path.suffix.lower() == ".npz":
        return ArchiveImages(path, shape)
    if not path.is_dir():
        raise DataError(f"there is no folder {path}; expected one with images, or an .npz file")
    if shape[0] not in MODES:
        raise ConfigError(f"the model takes images of {shape[0]} channels, which image files do not have; give an .npz")
    found = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in SUFFIXES and not file.name.startswith(".") and file.is_file()
    )
    if not found:
        raise DataError(f"{path} has no images; expected files {', '.join(sorted(SUFFIXES))}, at any level")
    return FolderImages(path, found)


@dataclass(frozen=True)
class FolderImages:
    """Files, by their paths below one folder."""

    folder: Path
    files: Sequence[Path]

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        """Its path below the folder."""
        return self.files[index].relative_to(self.folder).as_posix()

    def read(self, index: int) -> Any:
        """As Pillow opens it, loaded."""
        image_module, ops = pillow()
        with image_module.open(self.files[index]) as image:
            image.load()
            return ops.exif_transpose(image)


class ArchiveImages:
    """One array of an .npz: uint8 or uint16 [N, H, W] or [N, H, W, channels], or floats in 0..1.

    All of it is in memory: that is how such files are packed.

    Raises:
        DataError: it cannot be read, or holds no such array.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int]) -> None:
        self._stem, self._shape = path.name, shape
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                key = next((key for key in KEYS if key in archive), None)
                found = sorted(archive)
                array = archive[key] if key else None
        except (*_FOREIGN, zipfile.BadZipFile) as error:
            raise DataError(f"cannot read {path} ({error}); expected an .npz of plain arrays") from error
        if array is None:
            raise DataError(f"{path} holds {', '.join(found) or 'nothing'}; expected an array {' or '.join(KEYS)}")
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
        """The file's name and the image's number."""
        return f"{self._stem}#{index}"

    def read(self, index: int) -> Any:
        """An array where it has the model's channels and size, else Pillow's image."""
        image = self._array[index]  # [H, W, channels]
        floats = image.dtype.kind == "f"
        if floats and not (np.isfinite(image).all() and image.min() >= 0 and image.max() <= 1):
            raise ValueError("values outside 0..1")
        if image.shape[2] == self._shape[0] and image.shape[:2] == self._shape[1:]:
            scale = 1.0 if floats else float(np.iinfo(image.dtype).max)
            return np.asarray(np.moveaxis(image, 2, 0) / np.float32(scale), dtype=np.float32)
        if image.shape[2] == 1 and image.dtype != np.uint8:
            scaled = image[..., 0] if floats else image[..., 0] / np.iinfo(image.dtype).max
            return pillow()[0].fromarray((scaled * 65535).round().astype(np.uint16))
        if image.dtype != np.uint8 or image.shape[2] not in MODES or self._shape[0] not in MODES:
            expected = [*self._shape[1:], self._shape[0]]
            raise ValueError(f"{image.dtype} of shape {list(image.shape)}; expected {expected}, or uint8")
        return pillow()[0].fromarray(image[..., 0] if image.shape[2] == 1 else image)


def brought(image: Any, shape: tuple[int, int, int]) -> Pixels:
    """Pillow's image as the model takes it.

    Raises:
        ValueError: it has other values than 8 or 16 bits.
    """
    channels, height, width = shape
    bilinear = pillow()[0].Resampling.BILINEAR
    if image.mode.startswith("I") or image.mode == "F":
        grey = _deep(image)
        if grey.size != (width, height):
            grey = grey.resize((width, height), bilinear)
        plane = np.asarray(grey, dtype=np.float32).clip(0, 65535) / np.float32(65535)
        return np.repeat(plane[None], channels, axis=0)
    if image.mode in ("P", "PA"):
        image = image.convert("RGBA")  # a palette may hold transparency
    image = image.convert(MODES[channels])
    if image.size != (width, height):
        image = image.resize((width, height), bilinear)
    found = np.asarray(image, dtype=np.float32) / np.float32(255)
    return np.ascontiguousarray(found[None] if channels == 1 else found.transpose(2, 0, 1))


def _deep(image: Any) -> Any:
    """A grey image of 16 bits as one of floats, 0 to 65535."""
    values = np.asarray(image)
    if image.mode == "F" or values.min(initial=0) < 0 or values.max(initial=0) > 65535:
        raise ValueError(f"mode {image.mode} with values beyond 16 bits; expected 8 or 16 bits a channel")
    return pillow()[0].fromarray(values.astype(np.float32))


def batches(
    images: Images, shape: tuple[int, int, int], size: int
) -> Iterator[tuple[list[str], NDArray[np.float32], list[Unreadable]]]:
    """Names and pixels [B, channels, H, W] of so many images at a time, and those among them that cannot be read."""
    for first in range(0, len(images), size):
        names, read, bad = list[str](), list[Pixels](), list[Unreadable]()
        for index in range(first, min(first + size, len(images))):
            try:
                read.append(_one(images, index, shape))
                names.append(images.name(index))
            except _FOREIGN as error:
                bad.append(Unreadable(images.name(index), " ".join(str(error).split())[:200] or type(error).__name__))
        pixels = np.stack(read) if read else np.zeros((0, *shape), dtype=np.float32)
        yield names, pixels, bad


def _one(images: Images, index: int, shape: tuple[int, int, int]) -> Pixels:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", pillow()[0].DecompressionBombWarning)  # an image of a GB is none
        found = images.read(index)
        return found if isinstance(found, np.ndarray) else brought(found, shape)


def pillow() -> tuple[Any, Any]:
    """Pillow's modules Image and ImageOps.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError as error:
        raise ConfigError("Pillow is not installed: reading images needs pip install 'protofed[export]'") from error
    return Image, ImageOps
