"""Read a site's image files into examples: decode them with several threads into one tensor."""

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

from protofed.client.data.decoding import Pixels, decode_file, silence_decoders
from protofed.client.data.image_error import UnreadableImageError, UnreadableImagesError
from protofed.client.data.image_files import IndexedFile, Scan, scan
from protofed.client.data.site_data import Examples
from protofed.client.data.split import DataSplit, draw_test_rows, refuse_test_fraction
from protofed.common.config.recipe import Data, Input
from protofed.common.errors import DataError

MOST_THREADS = 8
AHEAD_BYTES = 64 << 20  # of decoded images that are not in the tensor yet
MOST_AHEAD = 256  # images
MOST_REASONS = 5  # that one error lists; none names a file
log = structlog.get_logger()


def read(data: Data, input_: Input, class_names: Sequence[str]) -> tuple[DataSplit, DataSplit]:
    """Read a source `folder` or `manifest` as training and test examples; files of the split val are left out.

    If the files have no split, the test set is drawn before any file is opened: so a file that becomes unreadable moves
    no other one between the sets.

    Raises:
        DataError: as `scan` and `Scan.check`; or there are no images.
        UnreadableImagesError: more cannot be read than `data.max_unreadable_fraction` allows.
    """
    files = scan(data, class_names, len(class_names))
    files.check()
    train, test = _split_items(files.items, data)
    items = [*train, *test]
    images, reasons = read_images([item.path for item in items], input_)
    _check_unreadable(items, reasons, files, data)
    readable = np.array([reason is None for reason in reasons], bool)
    count = int(readable[: len(train)].sum())  # `images` has the readable ones only: first those for training
    rows = np.flatnonzero(readable)
    train_split = _examples(items, images, rows[:count], slice(count))
    return train_split, _examples(items, images, rows[count:], slice(count, None))


def read_images(paths: Sequence[Path], input_: Input) -> tuple[NDArray[np.generic], list[str | None]]:
    """Read the images that can be read, in the order of their paths.

    Returns:
        [n, channels, H, W], uint8, or float32 in 0..1 if any file has more than 8 bits; and for each path why it
        cannot be read, or None.

    Raises:
        DataError: something is missing that all files need, such as a decoder.
    """
    images: NDArray[np.generic] = np.empty((0, *input_.shape), np.uint8)
    reasons, filled = list[str | None](), 0
    # `pool.map` decodes ahead without bound, so paths are given to it in portions.
    ahead = max(MOST_THREADS, min(MOST_AHEAD, AHEAD_BYTES // (4 * prod(input_.shape))))
    with silence_decoders(), ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for first in range(0, len(paths), ahead):
            for result in pool.map(partial(_decode_or_reason, input_=input_), paths[first : first + ahead]):
                reasons.append(result if isinstance(result, str) else None)
                if not isinstance(result, str):
                    images = _allocated(images, filled, result.dtype, len(paths))
                    images[filled] = result if result.dtype == images.dtype else result / np.float32(255)
                    filled += 1
    return images[:filled], reasons


def _decode_or_reason(path: Path, input_: Input) -> Pixels | str:
    try:
        return decode_file(path, input_)
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
        larger[row] = images[row].astype(np.float32) / np.float32(255)
    return larger


def _split_items(items: Sequence[IndexedFile], data: Data) -> tuple[list[IndexedFile], list[IndexedFile]]:
    train = [item for item in items if item.split in (None, "train")]
    test = [item for item in items if item.split == "test"]
    if not train and not test:
        raise DataError(f"{data.root} has no images to train on or to test; expected some of the run's classes")
    if test:
        refuse_test_fraction(data)
        return train, test
    group = np.array([item.group for item in train]) if train[0].group is not None else None
    rows = draw_test_rows(np.array([item.index for item in train]), group, data)
    train_items, test_items = ([train[row] for row in half] for half in rows)
    return train_items, test_items


def _check_unreadable(items: Sequence[IndexedFile], reasons: Sequence[str | None], files: Scan, data: Data) -> None:
    unreadable = [(item.name, reason) for item, reason in zip(items, reasons, strict=True) if reason is not None]
    unreadable += [(name, "in no class's folder") for name in files.misplaced]
    count, total = len(unreadable), len(reasons) + len(files.misplaced)
    if count > data.max_unreadable_fraction * total:
        counts = Counter(reason for _, reason in unreadable)
        listed = ", ".join(f"{times} {reason}" for reason, times in counts.most_common(MOST_REASONS))
        raise UnreadableImagesError(
            f"{count} of {total} images cannot be read: {listed}{', …' if len(counts) > MOST_REASONS else ''}; "
            f"data.max_unreadable_fraction allows {data.max_unreadable_fraction:g}: remove or replace these files, "
            "which `protofed client check` lists, or raise it",
            unreadable,
        )
    if count:
        log.warning("images cannot be read and are left out", count=count)


def _examples(
    items: Sequence[IndexedFile], images: NDArray[np.generic], rows: NDArray[np.intp], place: slice
) -> DataSplit:
    """The split of `items[rows]`, whose images are `images[place]`."""
    labels = torch.tensor([items[row].index for row in rows], dtype=torch.int64)
    groups = [items[row].group for row in rows]
    group = np.array(groups) if items[0].group is not None else None
    return DataSplit(Examples(torch.from_numpy(images[place]), labels), group=group)
