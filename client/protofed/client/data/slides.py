"""Tiles of whole slides by OpenSlide: only the tile is read, whatever the size of the slide."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from protofed.client.data.file_entry import UnreadableImageError
from protofed.client.data.volumes import ImageTile
from protofed.common.errors import DataError
from protofed.common.version import install_hint

if TYPE_CHECKING:
    from PIL.Image import Image


def read_tile(path: Path, tile: ImageTile) -> Image:
    """A tile at the full resolution (level 0), as mode RGBA; transparent where the slide was not scanned.

    Raises:
        UnreadableImageError: no slide that OpenSlide reads, or the tile crosses its edge.
        DataError: OpenSlide is not installed.
    """
    openslide = _library()
    try:
        with openslide.OpenSlide(path) as slide:
            tile.check(*slide.dimensions)
            image: Image = slide.read_region((tile.x, tile.y), 0, (tile.width, tile.height))
            return image
    except openslide.OpenSlideUnsupportedFormatError as error:
        raise UnreadableImageError(
            "neither a slide that OpenSlide reads nor an image that Pillow reads whole"
        ) from error


def find_kind(path: Path) -> str | None:
    """The format as OpenSlide calls it, such as `aperio`; None: no slide that it reads.

    Raises:
        DataError: OpenSlide is not installed.
    """
    kind: str | None = _library().OpenSlide.detect_format(path)
    return kind


def _library() -> Any:
    try:
        import openslide
    except ImportError as error:  # the package, or the C library that openslide-bin brings
        raise DataError(f"whole slides need OpenSlide, which is not installed: {install_hint('histology')}") from error
    return openslide
