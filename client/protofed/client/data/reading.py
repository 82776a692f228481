"""Read a site's pictures into one array: with several threads into memory, or by processes onto a disk."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.client.data.decoding import deepened, silence_decoders
from protofed.client.data.examples import Examples, as_tensor
from protofed.client.data.file_entry import UnreadableImageError
from protofed.client.data.image_cache import CachedImages, ImageCache, Report, depth_of_first
from protofed.client.data.pictures import DecodedPicture, Facts, StoredPicture
from protofed.common.config.settings import Cache
from protofed.common.config.tables import Input

MAX_THREADS = 8
AHEAD_BYTES = 64 << 20  # of decoded images that are not in the array yet
MAX_AHEAD = 256  # images


@dataclass(frozen=True)
class Reading:
    """How pictures are read.

    Attributes:
        cache: where they are kept decoded, if memory should not hold them.
        report: called as they are decoded onto the disk; None: the log has it.
    """

    cache: Cache = field(default_factory=Cache)
    report: Report | None = None


@dataclass(frozen=True, eq=False)
class ReadImages:
    """Images that were read.

    Attributes:
        images: [M, channels, H, W], uint8, or uint16 if any of them has more than 8 bits.
        rows: the row of each picture, [n] int64; -1: it cannot be read.
        reasons: for each picture why it cannot be read, or None.
        facts: of each picture.
        source: the cache that `images` are mapped from; None: they are in memory.
    """

    images: Tensor
    rows: NDArray[np.int64]
    reasons: Sequence[str | None]
    facts: Sequence[Facts]
    source: CachedImages | None = None
    shared: dict[Hashable, Any] = field(default_factory=dict)

    def examples(self, places: NDArray[np.intp], labels: Tensor) -> Examples:
        """The pictures of these places, which could be read, with labels [n] int64: views of the images."""
        rows = torch.from_numpy(self.rows[places])
        return Examples(self.images, labels, None, rows, self.source, self.shared)


def image_cache_for(pictures: Sequence[StoredPicture], input_: Input, reading: Reading) -> ImageCache | None:
    """The cache for these pictures; None: memory may hold them."""
    nbytes, limit = len(pictures) * prod(input_.shape), reading.cache.memory_mb * 1e6
    if nbytes <= limit < 2 * nbytes:
        nbytes *= depth_of_first(pictures, input_) // 8
    return ImageCache(reading.cache, input_, reading.report) if nbytes > limit else None


def read_images(pictures: Sequence[StoredPicture], input_: Input, cache: ImageCache | None) -> ReadImages:
    """Read the images that can be read, in the order of their pictures.

    Args:
        cache: None: into memory.

    Raises:
        DataError: something is missing that all pictures need, such as a decoder; or the cache has no room.
    """
    if cache is None:
        return _read_into_memory(pictures, input_)
    prepared = cache.prepare(pictures)
    images = as_tensor(prepared.images)
    return ReadImages(images, prepared.rows, prepared.reasons, prepared.facts, prepared.images)


def _read_into_memory(pictures: Sequence[StoredPicture], input_: Input) -> ReadImages:
    images: NDArray[np.generic] = np.empty((0, *input_.shape), np.uint8)
    reasons, facts, filled = list[str | None](), list[Facts](), 0
    # `pool.map` decodes ahead without bound, so pictures are given to it in portions.
    ahead = max(MAX_THREADS, min(MAX_AHEAD, AHEAD_BYTES // (4 * prod(input_.shape))))
    threads = 1 if any(picture.serial for picture in pictures[:1]) else MAX_THREADS
    with silence_decoders(), ThreadPoolExecutor(min(threads, len(os.sched_getaffinity(0)))) as pool:
        for first in range(0, len(pictures), ahead):
            for result in pool.map(partial(_decode_or_reason, input_=input_), pictures[first : first + ahead]):
                reasons.append(result if isinstance(result, str) else None)
                facts.append(Facts() if isinstance(result, str) else result.facts)
                if not isinstance(result, str):
                    pixels = result.pixels
                    images = _allocated(images, filled, pixels.dtype, len(pictures))
                    images[filled] = pixels if pixels.dtype == images.dtype else deepened(pixels)
                    filled += 1
    readable = np.array([reason is None for reason in reasons], bool)
    rows = np.where(readable, readable.cumsum() - 1, -1)
    return ReadImages(torch.from_numpy(images[:filled]), rows, reasons, facts)


def _decode_or_reason(picture: StoredPicture, input_: Input) -> DecodedPicture | str:
    try:
        return picture.decode(input_)
    except UnreadableImageError as error:
        return str(error)


def _allocated(
    images: NDArray[np.generic], filled: int, dtype: np.dtype[np.generic], count: int
) -> NDArray[np.generic]:
    """`images` [count, channels, H, W], allocated at the first image, and again at the first of more than 8 bits."""
    if len(images) and (images.dtype == dtype or dtype == np.uint8):
        return images
    larger = np.empty((count, *images.shape[1:]), dtype)
    for row in range(filled):  # one by one: all at once would need another copy of all images
        larger[row] = deepened(images[row])
    return larger
