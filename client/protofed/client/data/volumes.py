"""Files of several frames: which of them count, by the run's rule `input.frames`.

A volume is a file of several frames or pages, or a folder with the files of a DICOM series. What opens one is a
generator in its own module; here a rule chooses from an open volume.

A part names one example of a file: "frame 12", counted from 1 as DICOM counts, or "tile X,Y,WIDTH,HEIGHT".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from protofed.client.data.file_entry import MAX_PIXELS, UnreadableImageError
from protofed.client.data.grey_values import GreyWindow, float_image, windowed
from protofed.common.config.tables import EveryFrame, Frames

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_FRAMES = 10_000  # of one file or series; the longest scans have a few thousand slices
_FRAME = re.compile(r"frame ([0-9]{1,9})")
_TILE = re.compile(r"tile ([0-9]{1,9}),([0-9]{1,9}),([0-9]{1,9}),([0-9]{1,9})")


class Volume(Protocol):
    """The frames of a file or series that is open."""

    @property
    def count(self) -> int:
        """Number of frames, from the header alone."""

    @property
    def several(self) -> str:
        """What is said where a run takes one image a file, and there are several frames."""

    def read(self, index: int) -> Image:
        """Decode one frame, 0..count-1: mode L or RGB of 8 bits, or F (grey) in 0..1.

        Raises:
            UnreadableImageError: it cannot be used.
        """


@dataclass(frozen=True)
class ImageTile:
    """A rectangle of a large image, in pixels of its full resolution, from the top left corner."""

    x: int
    y: int
    width: int
    height: int

    def __str__(self) -> str:
        """The part's text."""
        return f"tile {self.x},{self.y},{self.width},{self.height}"

    def check(self, width: int, height: int) -> None:
        """Check that it lies within an image of this size.

        Raises:
            UnreadableImageError: it does not, or has too many pixels.
        """
        if self.width * self.height > MAX_PIXELS:
            raise UnreadableImageError(f"a tile of more than {MAX_PIXELS:,} pixels; expected a smaller data.tile_size")
        if self.x + self.width > width or self.y + self.height > height:
            raise UnreadableImageError(f"a tile that crosses the edge of its image of {width} x {height} pixels")


def parse_part(part: str) -> ImageTile | int | None:
    """The tile or the number of the frame that a part names; None: the whole file.

    Raises:
        ValueError: it is no part.
    """
    if match := _FRAME.fullmatch(part):
        return int(match[1])
    if match := _TILE.fullmatch(part):
        return ImageTile(*map(int, match.groups()))
    if part:
        raise ValueError(f"{part!r} is no part of a file; expected 'frame N' or 'tile X,Y,WIDTH,HEIGHT'")
    return None


def gives_several(frames: Frames) -> bool:
    """Whether a file of several frames gives several examples by this rule."""
    return frames == "all" or isinstance(frames, EveryFrame)


def name_parts(count: int, frames: Frames) -> Sequence[str]:
    """The parts of a file of so many frames that are examples; "" is the whole file, read by the rule itself."""
    if not 1 < count <= MAX_FRAMES or not gives_several(frames):
        return ("",)
    step = frames.every if isinstance(frames, EveryFrame) else 1
    return [f"frame {number}" for number in range(1, count + 1, step)]


def read_frame(volume: Volume, frames: Frames, number: int | None, window: GreyWindow | None) -> Image:
    """The image that a frame's number or, without one, the run's rule takes from an open volume.

    Args:
        number: from 1.
        window: the run's, as of `decoding.open_image`.

    Raises:
        UnreadableImageError: there is no such frame, there are too many, or the rule takes one image a file.
    """
    count = volume.count
    if number is not None:
        if not 1 <= number <= count:
            raise UnreadableImageError(f"frame {number} of a file that has {count}")
        return volume.read(number - 1)
    if count == 1:
        return volume.read(0)
    if frames != "one" and not 0 < count <= MAX_FRAMES:
        raise UnreadableImageError(f"{count} frames; expected 1 to {MAX_FRAMES:,}")
    match frames:
        case "middle":
            return volume.read(count // 2)
        case "max" | "mean":
            return _projected(volume, window, mean=frames == "mean")
        case _:  # by "all" the frames have been listed as parts, unless the file has changed since
            raise UnreadableImageError(volume.several)


def _projected(volume: Volume, window: GreyWindow | None, *, mean: bool) -> Image:
    """Maximum or mean over all frames, folded frame by frame: two frames are in memory, however many there are."""
    from PIL import Image

    frames = _alike(_values(volume.read(index), window) for index in range(volume.count))
    if mean:
        folded = reduce(np.add, (values.astype(np.float64) for values in frames)) / volume.count
    else:
        folded = reduce(np.maximum, frames)
    if folded.ndim == 2:
        return float_image(folded.astype(np.float32))
    return Image.fromarray(np.rint(folded).astype(np.uint8))


def _alike(frames: Iterator[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """The same frames.

    Raises:
        UnreadableImageError: they differ in size, or some are grey and some in colour.
    """
    shape: tuple[int, ...] | None = None
    for values in frames:
        if shape not in (None, values.shape):
            raise UnreadableImageError("frames of several sizes or colours; expected them alike")
        shape = values.shape
        yield values


def _values(image: Image, window: GreyWindow | None) -> NDArray[Any]:
    """[H, W] in 0..1, after the window; or [H, W, 3] of 8 bits, before it: as an image may have no other colours."""
    values = np.asarray(image)
    if image.mode != "L":
        return values
    return windowed(values, window) if window is not None else values / np.float32(255)
