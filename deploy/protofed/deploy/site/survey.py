"""A site's images one by one, as a run would have them: what each is, which are alike, which cannot be read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from protofed.client.data import arrays, dicom
from protofed.client.data.decoding import FORMATS, decode, decoded, quiet
from protofed.client.data.image_error import UnreadableImageError
from protofed.client.data.image_files import IndexedFile, Scan, rooted
from protofed.client.data.labels import by_number, plain
from protofed.client.data.split import DataSplit
from protofed.common.config.recipe import Data, Input
from protofed.common.errors import DataError

Pixels: TypeAlias = NDArray[Any]  # [channels, H, W], uint8, or float32 in 0..1
AHEAD = 256  # files that are worked on at a time
DRAWN = "no split"  # of images whose source has none of its own: settings and seed decide what is held out
_DICOM_TAGS = ["Rows", "Columns", "BitsStored", "PhotometricInterpretation"]


@dataclass(frozen=True)
class Seen:
    """One image that has a class of the run.

    Attributes:
        name: its path below the root or, of arrays, its place in them.
        label: the site's own.
        index: the run's class, 0..C-1.
        split: train, val or test, or DRAWN.
        format: how it is stored: "JPEG, RGB, 8 bits"; empty if that cannot be said.
        size: width and height as stored; None if that cannot be said.
        digest: BLAKE3 of what the model sees; None: it cannot be read.
        why: that it cannot be read.
        sums: [channels, 3]: of the pixels in 0..1, of their squares, and how many there are.
    """

    name: str
    label: str
    index: int
    split: str
    format: str = ""
    size: tuple[int, int] | None = None
    digest: str | None = None
    why: str | None = None
    sums: NDArray[np.float64] | None = None


@dataclass(frozen=True, eq=False)
class Survey:
    """All images of a source, and how one of them is had again.

    Attributes:
        images: in the source's order.
        ignored, unmapped: images by own label that have no class, as in `files.Scan`.
        pixels: of the image in this place, as the model sees it before normalisation.
    """

    images: Sequence[Seen]
    ignored: Counter[str]
    unmapped: Counter[str]
    pixels: Callable[[int], Pixels]


def of_files(found: Scan, input_: Input, done: Callable[[], None] = lambda: None) -> Survey:
    """Of a source `folder` or `manifest`; every file is read, several at a time.

    Args:
        done: told of every image.

    Raises:
        DataError: something is missing that all files need.
    """
    images, items = list[Seen](), found.items
    with quiet(), ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for first in range(0, len(items), AHEAD):
            for seen in pool.map(partial(_of_file, input_=input_), items[first : first + AHEAD]):
                images.append(seen)
                done()
    return Survey(images, found.ignored, found.unmapped, lambda place: decode(items[place].path, input_))


def of_arrays(data: Data, class_names: Sequence[str], done: Callable[[], None] = lambda: None) -> Survey:
    """Of a source with numbers for labels.

    Raises:
        DataError: it is missing or unreadable.
    """
    train, test = arrays.read(rooted(data))
    images, rows, unmapped = list[Seen](), list[Pixels](), Counter[str]()
    ignored, names = Counter[str](), frozenset(map(plain, data.ignore_labels))
    for split, half in (("train" if test is not None else DRAWN, train), ("test", test)):
        if half is None:
            continue
        meant = _meant(half, data, class_names)
        for row, number in enumerate(half.examples.labels.tolist()):
            if (index := meant[number]) is None:
                (ignored if str(number) in names else unmapped)[str(number)] += 1
                continue
            rows.append(half.examples.images[row].numpy())
            where = f"{'image' if split == DRAWN else split} {row}"
            images.append(_measured(Seen(where, str(number), index, split), rows[-1], _array_format(rows[-1])))
            done()
    return Survey(images, ignored, unmapped, rows.__getitem__)


def _format_of(path: Path) -> tuple[str, tuple[int, int] | None]:
    """How a file says that it is stored, and width and height, if it says so; nothing is decoded."""
    try:
        return _header(path)
    except Exception:  # decoders of damaged files raise anything
        return "", None


def _header(path: Path) -> tuple[str, tuple[int, int]]:
    if dicom.is_one(path):
        import pydicom

        found = pydicom.dcmread(path, specific_tags=_DICOM_TAGS, stop_before_pixels=True)
        return f"DICOM, {found.PhotometricInterpretation}, {found.BitsStored} bits", (found.Columns, found.Rows)
    from PIL import Image

    with Image.open(path, formats=FORMATS) as image:
        bits = {"1": 1, "I": 32, "F": 32}.get(image.mode, 16 if ";16" in image.mode else 8)
        colours = {"L": "grey", "1": "grey", "P": "palette"}.get(image.mode, "grey" if bits > 8 else image.mode)
        return f"{image.format}, {colours}, {bits} bit{'s' if bits > 1 else ''}", image.size


def mean_and_std(images: Sequence[Seen]) -> tuple[list[float], list[float]] | None:
    """By channel, of pixels in 0..1; None: of no image, or of images with different channels."""
    sums = [seen.sums for seen in images if seen.sums is not None]
    if not sums or len({len(one) for one in sums}) != 1:
        return None
    total, squares, count = np.sum(sums, axis=0).T  # [channels] each
    mean = total / count
    return mean.tolist(), np.sqrt(np.maximum(squares / count - mean**2, 0)).tolist()


def _of_file(item: IndexedFile, input_: Input) -> Seen:
    seen = Seen(item.name, item.label, item.index, item.split or DRAWN)
    try:
        pixels = decoded(item.path, input_)
    except UnreadableImageError as error:
        stored, size = _format_of(item.path)
        return replace(seen, why=str(error), format=stored, size=size)
    return _measured(seen, pixels, _format_of(item.path))


def _measured(seen: Seen, pixels: Pixels, stored: tuple[str, tuple[int, int] | None]) -> Seen:
    unit = 255.0 if pixels.dtype == np.uint8 else 1.0
    flat = pixels.reshape(len(pixels), -1).astype(np.float64) / unit  # [channels, H * W]
    sums = np.stack((flat.sum(1), (flat**2).sum(1), np.full(len(flat), flat.shape[1])), axis=1)
    digest = blake3(repr((pixels.shape, pixels.dtype.name)).encode() + np.ascontiguousarray(pixels).tobytes())
    return replace(seen, format=stored[0], size=stored[1], digest=digest.hexdigest(), sums=sums)


def _array_format(pixels: Pixels) -> tuple[str, tuple[int, int]]:
    channels, height, width = pixels.shape
    colours = {1: "grey", 3: "RGB"}.get(channels, f"{channels} channels")
    return f"array, {colours}, {8 * pixels.itemsize} bits", (width, height)


def _meant(half: DataSplit, data: Data, class_names: Sequence[str]) -> dict[int, int | None]:
    """The run's class of each number; None: of none."""

    def one(number: int) -> int | None:
        try:
            _, classes = by_number(np.array([number]), data, class_names)
        except DataError:
            return None
        return int(classes[0]) if len(classes) else None

    return {int(number): one(int(number)) for number in np.unique(half.examples.labels.numpy())}
