"""From an image file to the model's input: one function of a path, a part of the file and the run's `[input]`.

The order is fixed: choose the frames, rotate as EXIF says, convert colours, scale values to 0..1, fit the size. Two
frames are in memory at a time, even where an image is the maximum or mean of many.

How an image file stores grey values, from its header: Pillow's pixels alone do not say what white is.

What Pillow would decode into wrong pixels without a word is refused here.
"""

from __future__ import annotations

import re
import stat
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import structlog
from numpy.typing import NDArray

from protofed.client.data import dicom, nifti, slides
from protofed.client.data.file_entry import MAX_FILE_BYTES, MAX_PIXELS, UnreadableImageError
from protofed.client.data.folder import is_image
from protofed.client.data.grey_values import GreyWindow, float_image, scaled, windowed
from protofed.client.data.series import sorted_slices
from protofed.client.data.volumes import ImageTile, Volume, gives_several, name_parts, parse_part, read_frame
from protofed.common.config.tables import Frames, Input
from protofed.common.errors import DataError

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
        scale: the factor of Pillow on the file's values.
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
    for refused, why in _tiff_problems(image.mode, tags, bits, inverted=inverted, signed=format_ == _SIGNED):
        if refused:
            raise UnreadableImageError(why)
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


def _tiff_problems(mode: str, tags: Any, bits: int, *, inverted: bool, signed: bool) -> Iterator[tuple[bool, str]]:
    """What Pillow would read wrongly: whether it is so, and what was expected."""
    compressed = tags.get(_COMPRESSION, 1) != 1
    # Pillow would read the first plane.
    yield (tags.get(_DEPTH, 1) != 1, "a TIFF file of a volume; expected one image a file")
    yield bits > 8 and mode not in (*DEEP, "I", "F"), _COLOURS
    # It would read -1 as 255.
    yield bits <= 8 and signed, "a TIFF file of 8 bits with a sign; expected 8 bits without one"
    subsampled = mode == "YCbCr" and tags.get(_SUBSAMPLING) != (1, 1)  # 2 x 2 is what no tag means
    yield subsampled, "a TIFF file in YCbCr with subsampling; expected RGB, or compression as JPEG"
    forgotten = bits != 8 or inverted or tags.get(_FILL_ORDER, 1) != 1  # where planes are apart, it forgets all three
    yield (
        tags.get(_PLANES, 1) == 2 and not compressed and forgotten,
        "a TIFF file whose planes are stored apart; expected its planes together",
    )
    yield mode == "F" and inverted, "a TIFF file of floating-point values where 0 is white; expected 0 to be black"
    # libtiff gives the machine's own order, and Pillow would swap the bytes once more.
    yield (
        mode in ("I", "F") and tags.prefix == b"MM" and compressed,
        "a compressed big-endian TIFF file of signed, 32-bit or floating-point values; expected little endian, or "
        "no compression",
    )


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


Pixels: TypeAlias = NDArray[Any]  # [channels, H, W], uint8, or uint16 where 65535 is white
FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "GIF", "WEBP", "JPEG2000")
_GREYS = ("L", "F")
_MAGIC = {b"II": "a TIFF file", b"MM": "a TIFF file", b"\xff\xd8": "a JPEG file", b"BM": "a BMP file"}
_first_picture = Lock()  # is acquired once, never released: by the first file of which only one picture is read
log = structlog.get_logger()


def decode(path: Path, input_: Input, part: str = "") -> Pixels:
    """Decode one example: a file, recognised by content and not by suffix, a part of one, or a folder's DICOM series.

    Read are PNG, JPEG, TIFF, BMP, GIF, WebP and JPEG 2000; DICOM, NIfTI and, for tiles, whole slides.

    Args:
        part: as of `FileEntry.part`; empty: the image that `input.frames` takes from the whole file.

    Returns:
        [channels, H, W]: uint8 from 8-bit files without `input.window`, else uint16.

    Raises:
        UnreadableImageError: empty, truncated, of an unknown type, of more frames than `input.frames` accepts, too
            large, partly transparent, or of a size or colours that the run accepts only with another `input.fit` or
            `input.colours`.
        DataError: pydicom, nibabel or openslide is not installed, which the file needs; or the run has more channels
            than image files.
    """
    with silence_decoders():
        return decode_file(path, input_, part)


@contextmanager
def silence_decoders() -> Iterator[None]:
    """Silence the decoders' warnings, which quote the files' content; changes the whole process's filters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def decode_file(path: Path, input_: Input, part: str = "") -> Pixels:
    """As `decode`, for several threads at once, inside of one `silence_decoders`.

    `warnings.catch_warnings` is not thread-safe, so it must be entered once around all threads.
    """
    return fit_to_input(open_image(path, input_.window, input_.frames, part), input_)


def fit_to_input(image: Image, input_: Input) -> Pixels:
    """Convert the colours, values and size of an image as the run's `[input]` says.

    Args:
        image: mode L or RGB of 8 bits, or F (grey) in 0..1.

    Returns:
        [channels, H, W] as of `decode`.

    Raises:
        UnreadableImageError: of a size or colours that the run accepts only with another `input.fit` or
            `input.colours`.
        DataError: the run has more channels than images have.
    """
    if input_.shape[0] not in (1, 3):
        raise DataError(f"input.shape has {input_.shape[0]} channels; image files have 1 or 3: expected a source npz")
    image = _coloured(image, input_)
    if input_.window is not None and image.mode != "F":
        return fit_planes(np.atleast_3d(windowed(np.asarray(image), input_.window)).transpose(2, 0, 1), input_)
    if input_.prepare:
        return fit_planes(np.atleast_3d(np.asarray(image)).transpose(2, 0, 1), input_)
    return _spread(np.atleast_3d(_fitted(image, input_)).transpose(2, 0, 1), input_)


def fit_planes(pixels: Pixels, input_: Input) -> Pixels:
    """Prepare an image of the run's colours by `input.prepare`, then fit its size.

    Args:
        pixels: [channels, H, W], uint8 or float32 in 0..1; of grey for a colour run, one channel is enough.

    Returns:
        [channels, H, W] as of `decode`.

    Raises:
        ConfigError: as of `Preparation`.
        UnreadableImageError: a transform fails on it, or it has a size that the run accepts only with another
            `input.fit`.
    """
    if input_.prepare:
        from protofed.client.data.preparation import Preparation  # PyTorch, which decoding alone does not need

        prepare = Preparation.of(input_)
        try:
            pixels = prepare(np.broadcast_to(pixels, (input_.shape[0], *pixels.shape[1:])))
        except DataError as error:  # of this image: in a run with noise it alone must be left out
            raise UnreadableImageError(str(error)) from error
    return _spread(np.stack([_fitted(float_image(plane), input_) for plane in pixels]), input_)


def _spread(pixels: Pixels, input_: Input) -> Pixels:
    """Grey repeated for each of the run's channels."""
    return np.ascontiguousarray(np.broadcast_to(_in_16_bits(pixels), input_.shape))


def deepened(pixels: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Pixels [...] of 8 bits in 16 bits: 255 becomes 65535."""
    return pixels.astype(np.uint16) * np.uint16(257)


def in_unit(pixels: Pixels) -> NDArray[np.float32]:
    """Pixels [...] as floats in 0..1, which floats are already."""
    return np.asarray(pixels / np.float32(white_level(pixels.dtype)), dtype=np.float32)


def white_level(dtype: np.dtype[Any]) -> float:
    """The value of white in pixels of a dtype."""
    return 1.0 if dtype.kind == "f" else float(np.iinfo(dtype).max)


def _in_16_bits(pixels: NDArray[Any]) -> Pixels:
    """Pixels of 8 bits as they are; float32 in 0..1 as uint16, which is finer than any file that is read."""
    return pixels if pixels.dtype == np.uint8 else np.rint(pixels * np.float32(65535)).astype(np.uint16)


def open_image(path: Path, window: GreyWindow | None, frames: Frames = "one", part: str = "") -> Image:
    """Read an image; returns mode L or RGB of 8 bits, or F (grey) in 0..1.

    Args:
        window: centre and width, for files of more than 8 bits.
        frames: the run's rule, for a whole file.
        part: as of `decode`.

    Raises:
        UnreadableImageError, DataError: as `decode`.
    """
    place = parse_part(part)
    with _reasons(path):
        if isinstance(place, ImageTile):
            return _read_tile(path, place, window)
        with _opened(path, window) as volume:
            return read_frame(volume, frames, place, window)


def list_parts(path: Path, frames: Frames) -> Sequence[str]:
    """The parts of a file or series that are examples by the run's rule; a file is opened if there may be several.

    A file that cannot be read has one part, the whole file: who decodes it learns the reason.

    Raises:
        DataError: a library is not installed, which the file needs.
    """
    if not gives_several(frames):
        return name_parts(1, frames)
    try:
        with _reasons(path):
            return name_parts(_count(path), frames)
    except UnreadableImageError:
        return name_parts(1, frames)


@contextmanager
def _reasons(path: Path) -> Iterator[None]:
    """Decoders raise anything on damaged files, and their texts may quote the content: instead say what is wrong."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:
        raise UnreadableImageError(_reason(error, path)) from error


@contextmanager
def _opened(path: Path, window: GreyWindow | None) -> Iterator[Volume]:
    """A file, or the folder of a DICOM series, as its frames."""
    files = list_files(path)
    if len(files) > 1:
        yield _Slices(sorted_slices(files), window)
    elif dicom.is_dicom(files[0]):
        yield dicom.open_frames(files[0], window)
    elif nifti.is_nifti(files[0]):
        with nifti.opened(files[0], window) as slices:
            yield slices
    else:
        with _pages(files[0], window) as pages:
            yield pages


def _count(path: Path) -> int:
    """Number of frames, from a header alone; of a series, the number of its files."""
    files = list_files(path)
    if len(files) > 1:
        return len(files)
    if dicom.is_dicom(files[0]):
        return dicom.count_frames(files[0])
    if nifti.is_nifti(files[0]):
        return nifti.count_slices(files[0])
    with _pages(files[0], None) as pages:
        return pages.count


def list_files(path: Path) -> Sequence[Path]:
    """The file itself; of a folder the files in it, by name: a series, or one file of several frames.

    Raises:
        UnreadableImageError: one of them is no file that can be read, or the folder has none.
    """
    files = [path]
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if is_image(file.name) and not file.is_dir()]
        if not files:
            raise UnreadableImageError("a folder without images; expected the DICOM files of one series")
    for file in files:
        _check_file(file)
    return files


@dataclass(frozen=True)
class _Slices:
    """The slices of a DICOM series, in their order; each is a file of one frame."""

    files: Sequence[Path]
    window: GreyWindow | None

    @property
    def count(self) -> int:
        return len(self.files)

    @property
    def several(self) -> str:
        return f"a series of {self.count} DICOM files; expected one image a file"

    def read(self, index: int) -> Image:
        return open_image(self.files[index], self.window)


def _reason(error: Exception, path: Path) -> str:
    from PIL.Image import DecompressionBombError

    if isinstance(error, DecompressionBombError):
        return f"far too many pixels; expected at most {MAX_PIXELS:,}"
    if isinstance(error, OSError) and error.errno is not None:  # of the system; decoders' own have no number
        return f"{error.strerror}".lower()
    if path.is_dir() or dicom.is_dicom(path):
        return "DICOM that is truncated or damaged"
    if nifti.is_nifti(path):
        return "NIfTI that is truncated or damaged"
    with path.open("rb") as file:
        type_ = _MAGIC.get(file.read(2))
    if type_ is not None:
        return f"{type_} that is truncated, damaged or of a kind that Pillow does not read. Save it as PNG"
    return "truncated, damaged or of no known type"


def _check_file(path: Path, *, of_any_size: bool = False) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise UnreadableImageError(f"{error.strerror}".lower()) from error
    if not stat.S_ISREG(status.st_mode):  # a pipe would never end
        raise UnreadableImageError("no regular file")
    if not status.st_size:
        raise UnreadableImageError("empty")
    if status.st_size > MAX_FILE_BYTES and not of_any_size:
        raise UnreadableImageError(f"larger than {MAX_FILE_BYTES >> 20} MiB")


@contextmanager
def _pages(path: Path, window: GreyWindow | None) -> Iterator[_Pages]:
    from PIL import Image

    # Opened here: a file that Pillow opens by its path it may map into memory, by a rotated TIFF's size after rotation.
    with path.open("rb") as file, Image.open(file, formats=FORMATS) as image:
        grey_gif = image.format == "GIF" and (image.mode == "L" or (image.mode == "P" and _is_grey(image)))
        yield _Pages(image, path, window, grey_gif)


@dataclass(frozen=True)
class _Pages:
    """The frames or pages of an image file that is open.

    Attributes:
        grey_gif: a GIF whose first frame is grey. Pillow gives its other frames as RGB.
    """

    image: ImageFile
    path: Path
    window: GreyWindow | None
    grey_gif: bool

    @property
    def count(self) -> int:
        if self.image.format == "MPO":  # a phone's JPEG: the picture, then a preview, a depth map or the like
            if _first_picture.acquire(blocking=False):
                log.info("some photographs hold several pictures; the first of each file is read")
            return 1
        return int(getattr(self.image, "n_frames", 1))

    @property
    def several(self) -> str:
        return f"{self.count} frames or pages, expected one image a file"

    def read(self, index: int) -> Image:
        from PIL import ImageOps

        self.image.seek(index)
        if self.image.width * self.image.height > MAX_PIXELS:
            raise UnreadableImageError(
                f"{self.image.width} x {self.image.height} pixels; expected at most {MAX_PIXELS:,}"
            )
        grey = read_header(self.image, self.path)
        self.image.load()  # only now are pixels decoded: all checks above read the header
        frame = _simplified(ImageOps.exif_transpose(self.image), grey, self.window)
        return frame.convert("L") if self.grey_gif and _has_shades_only(frame) else frame


def _read_tile(path: Path, tile: ImageTile, window: GreyWindow | None) -> Image:
    """A tile of an ordinary image, which is decoded whole, or else of a slide, of which only the tile is read."""
    _check_file(path, of_any_size=True)
    if not is_ordinary(path):
        return _opaque(slides.read_tile(path, tile))
    with _pages(path, window) as pages:
        image = pages.read(0)
    tile.check(*image.size)
    return image.crop((tile.x, tile.y, tile.x + tile.width, tile.y + tile.height))


def is_ordinary(path: Path) -> bool:
    """Whether Pillow reads a file as one image, and that is not too large to be decoded."""
    try:
        with _pages(path, None) as pages:
            return pages.count == 1 and pages.image.width * pages.image.height <= MAX_PIXELS
    except Exception:  # the formats of slides are variants of TIFF, on which Pillow fails in many ways
        return False


def _simplified(image: Image, grey: StoredGrey, window: GreyWindow | None) -> Image:
    """Pillow's many modes reduced to L, RGB, or F in 0..1."""
    if image.mode in (*DEEP, "I", "F"):
        return float_image(_deep(image, grey, window))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = _opaque(image)
    if image.mode == "P":
        return image.convert("L" if _is_grey(image) else "RGB")
    if image.mode in ("1", "YCbCr"):
        return image.convert("L" if image.mode == "1" else "RGB")
    if image.mode not in ("L", "RGB"):
        raise UnreadableImageError(f"colours as {image.mode}; expected grey or RGB")
    return image


def _deep(image: Image, grey: StoredGrey, window: GreyWindow | None) -> NDArray[np.float32]:
    """[H, W], values of more than 8 bits scaled to 0..1: by the run's window, or by all that their bits can hold."""
    values = grey.values(image)
    if "transparency" in image.info and (values == image.info["transparency"]).any():
        raise UnreadableImageError("partly transparent; expected an opaque image")
    return scaled(values, grey.most, window)


def _opaque(image: Image) -> Image:
    """The image without its alpha channel, which must be opaque: a background to blend with would be a guess."""
    rgba = image.convert("RGBA")
    if rgba.getchannel("A").getextrema() != (255, 255):
        raise UnreadableImageError("partly transparent; expected an opaque image")
    if image.mode in ("P", "PA"):
        return rgba.convert("RGB" if not _is_grey(image) else "L")
    return rgba.convert("L" if image.mode in ("1", "LA", "La", "L") else "RGB")


def _is_grey(image: Image) -> bool:
    """Whether the palette of an image has shades of grey only."""
    colours = np.array(image.getpalette("RGB") or [0, 0, 0]).reshape(-1, 3)
    return bool((colours == colours[:, :1]).all())


def _has_shades_only(image: Image) -> bool:
    """Whether an image of mode RGB has no colours; true of one that is grey."""
    pixels = np.atleast_3d(np.asarray(image))
    return bool((pixels == pixels[..., :1]).all())


def _coloured(image: Image, input_: Input) -> Image:
    """Convert between grey and RGB, if `input.colours` allows it. Grey for an RGB run stays one channel here."""
    channels = 1 if image.mode in _GREYS else 3
    if channels == input_.shape[0]:
        return image
    if input_.colours == "exact":
        names = {1: "grey", 3: "RGB"}
        raise UnreadableImageError(
            f"{names[channels]}, and the run accepts {names[input_.shape[0]]} images only (input.colours)"
        )
    return image.convert("L") if channels == 3 else image  # luma of ITU-R 601; `fit_to_input` repeats grey


def _fitted(image: Image, input_: Input) -> Pixels:
    """[H, W] or [H, W, 3] with the run's H and W."""
    height, width = input_.shape[1:]
    if image.size == (width, height):
        return np.asarray(image)
    ratios = width / image.width, height / image.height
    match input_.fit:
        case "exact":
            raise UnreadableImageError(
                f"{image.width} x {image.height} pixels, and the run accepts {width} x {height} only (input.fit)"
            )
        case "stretch":
            return _resized(image, width, height)
        case "crop":
            return _cropped(image, max(ratios), height, width)
        case "pad":
            return _padded(_resized(image, *_scaled(image, min(ratios))), height, width)


def _scaled(image: Image, factor: float) -> tuple[int, int]:
    """Width and height, at least 1."""
    return max(1, round(image.width * factor)), max(1, round(image.height * factor))


def _cropped(image: Image, factor: float, height: int, width: int) -> Pixels:
    """The middle [height, width, ...] of the scaled image. Only that part is computed: the whole may be huge."""
    scaled_width, scaled_height = _scaled(image, factor)
    left, top = (scaled_width - width) // 2, (scaled_height - height) // 2
    # Multiplied before divided: an end that rounding puts outside of the image is an error.
    columns = (left * image.width / scaled_width, (left + width) * image.width / scaled_width)
    rows = (top * image.height / scaled_height, (top + height) * image.height / scaled_height)
    return _resized(image, width, height, (columns[0], rows[0], columns[1], rows[1]))


def _resized(image: Image, width: int, height: int, box: tuple[float, float, float, float] | None = None) -> Pixels:
    """[height, width, ...]: the image, or the part of it in `box` (left, top, right, bottom)."""
    from PIL.Image import Resampling

    if box is None and width * image.height > MAX_PIXELS:
        # Pillow resizes rows first; of a thin image that would be more pixels than any image may have.
        image = image.resize((image.width, height), Resampling.BILINEAR)
    pixels = np.asarray(image.resize((width, height), Resampling.BILINEAR, box))
    return pixels.clip(0, 1) if image.mode == "F" else pixels  # interpolation may exceed 1 by rounding


def _padded(pixels: Pixels, height: int, width: int) -> Pixels:
    """[height, width, ...]: the image in the middle of black."""
    margins = [(0, 0)] * pixels.ndim
    for axis, size in enumerate((height, width)):
        spare = size - pixels.shape[axis]
        margins[axis] = (spare // 2, spare - spare // 2)
    return np.pad(pixels, margins)
