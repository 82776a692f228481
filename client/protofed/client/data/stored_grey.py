"""How an image file stores grey values, from its header: Pillow's pixels alone do not say what white is.

What Pillow would decode into wrong pixels without a word is refused here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protofed.client.data.image_error import UnreadableImageError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

DEEP = ("I;16", "I;16L", "I;16B", "I;16N")  # Pillow's 16-bit modes
_COLOURS = "colours of more than 8 bits; expected 8 bits, or 16 in grey"
# Numbers of TIFF tags.
_BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER, _PLANES, _COLOUR_MAP, _FORMAT, _SUBSAMPLING, _DEPTH = (
    *(258, 259, 262, 266, 284, 320, 339, 530, 32997),
)
_UNSIGNED, _SIGNED = 1, 2  # of _FORMAT
_JPEG_2000_START = b"\xff\x4f\xff\x51"  # the markers SOC and SIZ; SIZ always follows (ISO 15444-1, A.4.1)


@dataclass(frozen=True)
class StoredGrey:
    """How grey values of more than 8 bits are stored.

    Attributes:
        most: what white is without a window; None: only a window can say.
        inverted: 0 is white.
        unsigned: 32 bits without a sign, which Pillow's mode I takes as signed.
        scale: by which Pillow multiplies the file's values.
    """

    most: float | None
    inverted: bool = False
    unsigned: bool = False
    scale: int = 1

    def values(self, image: Image) -> NDArray[np.float64]:
        """[H, W] in the file's own units, where more is brighter: what is stored inverted is turned round."""
        pixels: NDArray[Any] = np.asarray(image)  # native byte order, whatever the file's
        values = (pixels.view(np.uint32) if self.unsigned else pixels).astype(np.float64) / self.scale
        return self.most - values if self.inverted and self.most is not None else values


def read_header(image: ImageFile, path: Path) -> StoredGrey:
    """Read how the values are stored, before `image` is loaded. It says nothing about images of at most 8 bits.

    Raises:
        UnreadableImageError: Pillow would decode these values wrongly, or reduce them to 8 bits.
    """
    match image.format:
        case "TIFF":
            return _tiff(image)
        case "JPEG2000":
            return _jpeg_2000(image, path)
        case _:
            # Only the raw mode of Pillow's tiles shows what it reads without a word: colours of 16 bits as 8 bits, and
            # greys of 2 and 4 bits as 8 bits, with the transparent one left as the file has it.
            raw = " ".join(str(tile.args) for tile in image.tile)
            if image.mode not in ("I", *DEEP) and ";16B" in raw:
                raise UnreadableImageError(_COLOURS)
            if "transparency" in image.info and re.search(r"\bL;[24]\b", raw):
                raise UnreadableImageError("less than 8 bits with a transparent grey; expected an opaque image")
            return StoredGrey(65535 if image.mode in DEEP else None)


def _tiff(image: Any) -> StoredGrey:
    tags = image.tag_v2
    bits, format_ = max(tags.get(_BITS, (1,))), max(tags.get(_FORMAT, (_UNSIGNED,)))
    inverted = tags.get(_PHOTOMETRIC, 0) == 0  # WhiteIsZero; Pillow turns 8 bits round, and no more than 8
    if tags.get(_DEPTH, 1) != 1:  # Pillow would read the first plane
        raise UnreadableImageError("a TIFF file of a volume; expected one image a file")
    if bits > 8 and image.mode not in (*DEEP, "I", "F"):
        raise UnreadableImageError(_COLOURS)
    if bits <= 8 and format_ == _SIGNED:  # Pillow would read -1 as 255
        raise UnreadableImageError("a TIFF file of 8 bits with a sign; expected 8 bits without one")
    if image.mode == "YCbCr" and tags.get(_SUBSAMPLING) != (1, 1):  # 2 x 2 is what no tag means
        raise UnreadableImageError("a TIFF file in YCbCr with subsampling; expected RGB, or compression as JPEG")
    apart = tags.get(_PLANES, 1) == 2 and tags.get(_COMPRESSION, 1) == 1
    if apart and (bits != 8 or inverted or tags.get(_FILL_ORDER, 1) != 1):  # Pillow forgets all three
        raise UnreadableImageError("a TIFF file whose planes are stored apart; expected its planes together")
    if image.mode == "F" and inverted:
        raise UnreadableImageError("a TIFF file of floating-point values where 0 is white; expected 0 to be black")
    if image.mode in ("I", "F") and tags.prefix == b"MM" and tags.get(_COMPRESSION, 1) != 1:
        # libtiff gives the machine's own order, and Pillow would swap the bytes once more.
        raise UnreadableImageError(
            "a compressed big-endian TIFF file of values with a sign, of 32 bits or floating-point; expected little "
            "endian, or no compression"
        )
    if image.mode in ("P", "PA") and max(tags[_COLOUR_MAP]) < 256:
        # The map's 16 bits hold 8, as of some old writers: Pillow would make it black. libtiff's rule (`checkcmap`).
        image.putpalette(np.reshape(tags[_COLOUR_MAP], (3, -1)).T.astype(np.uint8).tobytes())
    match image.mode:
        case "F":
            return StoredGrey(1)
        case "I":
            return StoredGrey(None, unsigned=format_ == _UNSIGNED)
        case _:
            return StoredGrey((1 << bits) - 1, inverted)  # packed 12 bits, as scanners write them, are not scaled


def _jpeg_2000(image: Image, path: Path) -> StoredGrey:
    """Pillow scales any depth to 8 or 16 bits by a shift; only the codestream's header says what there was."""
    content = path.read_bytes()
    # Lsiz, Rsiz, eight sizes and the number of components precede a byte for each component: sign and bits - 1.
    first = content.index(_JPEG_2000_START) + len(_JPEG_2000_START) + 38
    components = content[first - 1]
    precisions = set(content[first : first + 3 * components : 3])
    if max(precisions) >= 128:
        raise UnreadableImageError("JPEG 2000 with a sign; expected values without one")
    bits = max(precisions) + 1
    if bits > 8 and image.mode not in DEEP:
        raise UnreadableImageError(_COLOURS)
    if bits > 16 or (min(precisions) + 1 < 8 and image.mode not in ("P", "PA")):
        raise UnreadableImageError("JPEG 2000 of less than 8 or more than 16 bits; expected 8, or 9 to 16 in grey")
    scale = 1 << (16 - bits) if bits > 8 else 1
    return StoredGrey((1 << bits) - 1, scale=scale)
