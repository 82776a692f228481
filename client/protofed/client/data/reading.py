"""From a site's files to examples: all of them are decoded, by several threads, into one tensor."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from protofed.client.data.decoding import Pixels, decoded, quiet
from protofed.client.data.image_error import UnreadableImageError
from protofed.client.data.image_files import IndexedFile, Scan, scan
from protofed.client.data.site_data import Examples
from protofed.client.data.split import DataSplit, held_out, refuse_test_share
from protofed.common.config.recipe import Data, Input
from protofed.common.errors import DataError

MOST_THREADS = 8
AHEAD_BYTES = 64 << 20  # of decoded images that wait for their place in the tensor
MOST_AHEAD = 256  # images
log = structlog.get_logger()


def read(data: Data, input_: Input, class_names: Sequence[str]) -> tuple[DataSplit, DataSplit]:
    """A source `folder` or `manifest` as training and test examples; files marked val are left alone.

    Without a split of their own, what is held out is drawn before any file is read: that one of them becomes
    unreadable moves no other.

    Raises:
        DataError: as `scan` and `Scan.check`; no images, or more unreadable ones than `data.max_unreadable_fraction`.
    """
    found = scan(data, class_names, len(class_names))
    found.check()
    train, test = _halves(found.items, data)
    items = [*train, *test]
    images, why = read_images([item.path for item in items], input_)
    _tolerate(why, found, data)
    kept = np.array([reason is None for reason in why], bool)
    there = int(kept[: len(train)].sum())
    rows = np.flatnonzero(kept)
    return _half(items, images, rows[:there], slice(there)), _half(items, images, rows[there:], slice(there, None))


def read_images(paths: Sequence[Path], input_: Input) -> tuple[NDArray[np.generic], list[str | None]]:
    """The images that can be read, in the order of their paths.

    Returns:
        [n, channels, H, W], uint8, or float32 in 0..1 where any file has more than 8 bits; and for each path why it
        cannot be read, or None.

    Raises:
        DataError: something is missing that all files need.
    """
    images: NDArray[np.generic] = np.empty((0, *input_.shape), np.uint8)
    why, filled = list[str | None](), 0
    ahead = max(MOST_THREADS, min(MOST_AHEAD, AHEAD_BYTES // (4 * prod(input_.shape))))
    with quiet(), ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for first in range(0, len(paths), ahead):
            for found in pool.map(partial(_tried, input_=input_), paths[first : first + ahead]):
                why.append(found if isinstance(found, str) else None)
                if not isinstance(found, str):
                    images = _room(images, filled, found.dtype, len(paths))
                    images[filled] = found if found.dtype == images.dtype else found / np.float32(255)
                    filled += 1
    return images[:filled], why


def _tried(path: Path, input_: Input) -> Pixels | str:
    try:
        return decoded(path, input_)
    except UnreadableImageError as error:
        return str(error)


def _room(images: NDArray[np.generic], filled: int, dtype: np.dtype[np.generic], count: int) -> NDArray[np.generic]:
    """Where all images have their place, of a dtype that holds the next one too; what is filled stays."""
    if len(images) and (images.dtype == dtype or dtype == np.uint8):
        return images
    room = np.empty((count, *images.shape[1:]), dtype)
    for row in range(filled):  # 8 bits, before the first file that has more; one by one, for memory's sake
        room[row] = images[row].astype(np.float32) / np.float32(255)
    return room


def _halves(items: Sequence[IndexedFile], data: Data) -> tuple[list[IndexedFile], list[IndexedFile]]:
    train = [item for item in items if item.split in (None, "train")]
    test = [item for item in items if item.split == "test"]
    if not train and not test:
        raise DataError(f"{data.root} has no images to train on or to test; expected some of the run's classes")
    if test:
        refuse_test_share(data)
        return train, test
    group = np.array([item.group for item in train]) if train[0].group is not None else None
    rows = held_out(np.array([item.index for item in train]), group, data)
    kept, held = ([train[row] for row in some] for some in rows)
    return kept, held


def _tolerate(why: Sequence[str | None], found: Scan, data: Data) -> None:
    reasons = Counter(reason for reason in why if reason is not None)
    reasons.update(["in no class's folder"] * len(found.astray))
    bad, of = reasons.total(), len(why) + len(found.astray)
    if bad > data.max_unreadable_fraction * of:
        most, times = reasons.most_common(1)[0]
        raise DataError(
            f"{bad} of {of} images cannot be read ({times}: {most}), "
            f"and data.max_unreadable_fraction allows {data.max_unreadable_fraction:g}; "
            "`protofed client check` lists them"
        )
    if bad:
        log.warning("images cannot be read and are left out", count=bad)


def _half(items: Sequence[IndexedFile], images: NDArray[np.generic], rows: NDArray[np.intp], place: slice) -> DataSplit:
    """The items in these rows, whose images have this place."""
    labels = torch.tensor([items[row].index for row in rows], dtype=torch.int64)
    groups = [items[row].group for row in rows]
    group = np.array(groups) if items[0].group is not None else None
    return DataSplit(Examples(torch.from_numpy(images[place]), labels), group=group)
