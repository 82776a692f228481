"""Reads a site's images one by one as a run would: label, format, digest and sums of pixels of each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from protofed.client.data import arrays, dicom, nifti, slides
from protofed.client.data.decoding import FORMATS, is_ordinary, list_files, silence_decoders, white_level
from protofed.client.data.examples import Examples
from protofed.client.data.file_entry import UnreadableImageError, normalise
from protofed.client.data.image_cache import ImageCache
from protofed.client.data.image_files import IndexedFile, Scan, as_picture, with_root
from protofed.client.data.labels import by_number
from protofed.client.data.reading import Reading, read_images
from protofed.client.data.volumes import ImageTile, parse_part
from protofed.client.task import ClientTask, Target
from protofed.common.config.data import Data
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

Pixels: TypeAlias = NDArray[Any]  # [channels, H, W], uint8 or uint16; of arrays also float32 in 0..1
Stored: TypeAlias = tuple[str, tuple[int, int] | None]  # as `SurveyedImage.format` and `size`
AHEAD = 256  # images that are submitted to the threads at a time
DRAWN = "no split"  # the split of images whose source has none: settings and seed decide what is held out
_DICOM_TAGS = ["Rows", "Columns", "BitsStored", "PhotometricInterpretation"]


@dataclass(frozen=True)
class SurveyedImage:
    """One image whose label is a class of the run.

    Attributes:
        name: its path below the root, with its frame or tile; in an array file, its row.
        label: the site's own label.
        target: what a model learns of it, such as the run's class 0..C-1.
        split: train, val or test, or DRAWN.
        format: as stored, such as "JPEG, RGB, 8 bits"; empty if unknown.
        size: width and height as stored, of a slice or tile if it is one; None if unknown.
        digest: BLAKE3 of the pixels that the model sees; None: it cannot be read.
        problem: the reason why it cannot be read; None: it can.
        sums: [channels, 3]: sum of the pixels in 0..1, sum of their squares, number of pixels; None: it cannot be read.
    """

    name: str
    label: str
    target: Target
    split: str
    format: str = ""
    size: tuple[int, int] | None = None
    digest: str | None = None
    problem: str | None = None
    sums: NDArray[np.float64] | None = None

    @property
    def outputs(self) -> tuple[int, ...]:
        """The classes or findings that it has, 0..C-1; of a number always 0."""
        if isinstance(self.target, tuple):
            return tuple(output for output, value in enumerate(self.target) if value == 1)
        return (self.target if isinstance(self.target, int) else 0,)


@dataclass(frozen=True, eq=False)
class Survey:
    """All images of a source.

    Attributes:
        images: in the source's order.
        ignored, unmapped: numbers of images without a class, by own label, as in `image_files.Scan`.
        pixels: reads image i of `images` again: [channels, H, W] as the model sees it before normalisation.
    """

    images: Sequence[SurveyedImage]
    ignored: Counter[str]
    unmapped: Counter[str]
    pixels: Callable[[int], Pixels]


def survey_files(
    scan: Scan, input_: Input, on_image: Callable[[], None] = lambda: None, cache: ImageCache | None = None
) -> Survey:
    """Read every file of a source `folder`, `manifest` or `dicomweb`, several at a time.

    Args:
        on_image: called after every image.
        cache: where the images are decoded to first, as the daemon does; None: nowhere.

    Raises:
        DataError: something is missing that all files need, such as a decoder.
    """
    # `silence_decoders` is entered once, around all threads: it changes the whole process's warning filters. Threads
    # suffice, for Pillow releases the interpreter's lock while it decodes.
    images, items = list[SurveyedImage](), scan.items
    read = partial(_decoded, input_=input_) if cache is None else _cached(items, input_, cache)
    survey_one = partial(_of_file, read=read, read_format=lru_cache(maxsize=AHEAD)(_read_format))
    with silence_decoders(), ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for first in range(0, len(items), AHEAD):
            for image in pool.map(survey_one, items[first : first + AHEAD]):
                images.append(image)
                on_image()

    def again(place: int) -> Pixels:
        with silence_decoders():
            return _decoded(items[place], input_)

    return Survey(images, scan.ignored, scan.unmapped, again)


def _decoded(item: IndexedFile, input_: Input) -> Pixels:
    return as_picture(item).decode(input_).pixels


def _cached(items: Sequence[IndexedFile], input_: Input, cache: ImageCache) -> Callable[[IndexedFile], Pixels]:
    """Reads from the cache, once all images are there."""
    read = read_images([as_picture(item) for item in items], input_, cache)
    images: Pixels = read.images.numpy()
    found = {item.name: place for item, *place in zip(items, read.rows.tolist(), read.reasons, strict=True)}

    def pixels(item: IndexedFile) -> Pixels:
        row, reason = found[item.name]
        if reason is not None:
            raise UnreadableImageError(reason)
        image: Pixels = images[row]
        return image

    return pixels


def survey_arrays(
    data: Data,
    input_: Input,
    class_names: Sequence[str],
    classes: int,
    task: ClientTask,
    reading: Reading,
    on_image: Callable[[], None] = lambda: None,
    *,
    noisy: bool = False,
) -> Survey:
    """Read a source of arrays, whose labels are numbers.

    Args:
        input_, reading: as of `arrays.read`.
        classes: C.
        task: what the labels are read as.
        on_image: called after every image.
        noisy: as of `sources.load`.

    Raises:
        DataError: it is missing or unreadable.
    """
    train, test = arrays.read(with_root(data), input_, reading, noisy=noisy)
    images, unmapped = list[SurveyedImage](), Counter[str]()
    places = list[tuple[Examples, int]]()  # of `images`
    ignored, names = Counter[str](), frozenset(map(normalise, data.ignore_labels))
    for split, split_data in (("train" if test is not None else DRAWN, train), ("test", test)):
        if split_data is None:
            continue
        examples = split_data.examples
        labels: NDArray[Any] = examples.labels.numpy()
        of_run = task, data, class_names, classes
        targets = _targets_of_numbers(labels, *of_run) if labels.ndim == 1 else by_number(labels, *of_run)[1].tolist()
        for row, (number, target) in enumerate(zip(labels.tolist(), targets, strict=True)):
            if target is None:
                (ignored if str(number) in names else unmapped)[str(number)] += 1
                continue
            places.append((examples, row))
            name = f"{'image' if split == DRAWN else split} {row}"
            image = SurveyedImage(
                name, _label_text(number), target if isinstance(target, int | float) else tuple(target), split
            )
            pixels = _pixels(examples, row)
            images.append(_with_pixels(image, pixels, _array_format(pixels)))
            on_image()
    return Survey(images, ignored, unmapped, lambda place: _pixels(*places[place]))


def _pixels(examples: Examples, row: int) -> Pixels:
    pixels: Pixels = examples.images[row if examples.rows is None else int(examples.rows[row])].numpy()
    return pixels


def _read_format(path: Path, *, tiles: bool) -> Stored:
    """Format, width and height from the header of a file or of a series' first file; empty and None if unknown."""
    try:
        if tiles and path.is_file() and not is_ordinary(path):  # opening a pipe would never end
            kind = slides.find_kind(path)
            return ("", None) if kind is None else (f"slide ({kind}), RGB, 8 bits", None)
        first, *more = list_files(path)
        return _header(first, " series" if more else "")
    except Exception:  # decoders of damaged files raise anything
        return "", None


def _header(path: Path, series: str) -> Stored:
    if dicom.is_dicom(path):
        header = dicom.read_elements(path, _DICOM_TAGS, stop_before_pixels=True)
        stored_as = f"DICOM{series}, {header.PhotometricInterpretation}, {header.BitsStored} bits"
        return stored_as, (header.Columns, header.Rows)
    if nifti.is_nifti(path):
        bits, size = nifti.read_layout(path)
        return f"NIfTI, grey, {bits} bits", size
    from PIL import Image

    with Image.open(path, formats=FORMATS) as image:
        bits = {"1": 1, "I": 32, "F": 32}.get(image.mode, 16 if ";16" in image.mode else 8)
        colours = {"L": "grey", "1": "grey", "P": "palette"}.get(image.mode, "grey" if bits > 8 else image.mode)
        return f"{image.format}, {colours}, {bits} bit{'s' if bits > 1 else ''}", image.size


def mean_and_std(images: Sequence[SurveyedImage]) -> tuple[list[float], list[float]] | None:
    """Means and stds by channel, [channels] each, of pixels in 0..1.

    None: no image could be read, or they have different numbers of channels.
    """
    sums = [image.sums for image in images if image.sums is not None]
    if not sums or len({len(channels) for channels in sums}) != 1:
        return None
    total, squares, count = np.sum(sums, axis=0).T  # [channels] each
    mean = total / count
    # E[x²] − E[x]² may be slightly negative by rounding where all pixels are equal.
    return mean.tolist(), np.sqrt(np.maximum(squares / count - mean**2, 0)).tolist()


def _of_file(
    item: IndexedFile, read: Callable[[IndexedFile], Pixels], read_format: Callable[..., Stored]
) -> SurveyedImage:
    image, tile = (
        SurveyedImage(item.name, "|".join(item.cells) or item.label, item.target, item.split or DRAWN),
        parse_part(item.part),
    )
    stored_as, size = "DICOM", None  # of a PACS: nothing is fetched twice for a table
    if item.remote is None:
        stored_as, size = read_format(item.path, tiles=isinstance(tile, ImageTile))
    if isinstance(tile, ImageTile):
        size = tile.width, tile.height
    try:
        return _with_pixels(image, read(item), (stored_as, size))
    except UnreadableImageError as error:
        return replace(image, problem=str(error), format=stored_as, size=size)


def _with_pixels(image: SurveyedImage, pixels: Pixels, stored_as: Stored) -> SurveyedImage:
    flat = pixels.reshape(len(pixels), -1).astype(np.float64) / white_level(pixels.dtype)  # [channels, H * W]
    sums = np.stack((flat.sum(1), (flat**2).sum(1), np.full(len(flat), flat.shape[1])), axis=1)
    # Shape and type are hashed, too: the same bytes may be another image.
    digest = blake3(repr((pixels.shape, pixels.dtype.name)).encode() + np.ascontiguousarray(pixels).tobytes())
    return replace(image, format=stored_as[0], size=stored_as[1], digest=digest.hexdigest(), sums=sums)


def _array_format(pixels: Pixels) -> tuple[str, tuple[int, int]]:
    channels, height, width = pixels.shape
    colours = {1: "grey", 3: "RGB"}.get(channels, f"{channels} channels")
    return f"array, {colours}, {8 * pixels.itemsize} bits", (width, height)


def _label_text(label: object) -> str:
    """A number, or the places of the ones in a row of numbers."""
    return "|".join(str(c) for c, value in enumerate(label) if value == 1) if isinstance(label, list) else str(label)


def _targets_of_numbers(
    labels: NDArray[Any], task: ClientTask, data: Data, class_names: Sequence[str], classes: int
) -> list[Target | None]:
    """The target of each label [N]; None: the label has none."""

    def find_target(number: Any) -> Target | None:
        try:
            _, (target,) = by_number(np.array([number], labels.dtype), task, data, class_names, classes)
        except (DataError, ValueError):  # unmapped, or ignored
            return None
        read = target.tolist()
        return tuple(read) if isinstance(read, list) else read

    present, of_each = np.unique(labels, return_inverse=True)
    targets = list(map(find_target, present))
    return [targets[place] for place in of_each]
