"""Read a site's image files into examples: decode them with several threads into one tensor."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
from protofed.client.data.partition import Indices
from protofed.client.data.sides import Units, units_of_files, units_of_groups
from protofed.client.data.site_data import Examples
from protofed.client.data.split import DataSplit, draw_test_rows, refuse_test_fraction
from protofed.common.config.recipe import Data, Input
from protofed.common.errors import DataError

MOST_THREADS = 8
AHEAD_BYTES = 64 << 20  # of decoded images that are not in the tensor yet
MOST_AHEAD = 256  # images
MOST_REASONS = 5  # that one error lists; none names a file
log = structlog.get_logger()


def read(data: Data, input_: Input, class_names: Sequence[str], *, noisy: bool = False) -> tuple[DataSplit, DataSplit]:
    """Read a source `folder` or `manifest` as training and test examples; files of the split val are left out.

    If the files have no split, the test set is drawn before any image is decoded: so a file that becomes unreadable
    moves no other one between the sets.

    Args:
        noisy: as of `sources.load`.

    Raises:
        DataError: as `scan` and, but for noise, `Scan.check`; or there are no images.
        UnreadableImagesError: more cannot be read than `data.max_unreadable_fraction` allows.
    """
    files = scan(data, class_names, len(class_names))
    if files.left_out:
        log.info("deleted files, and files that are no images by their name, are left out", count=len(files.left_out))
    if not noisy:
        files.check()
    usable = files.usable() if noisy else files.items
    units = _units(usable) if noisy else None
    train, test = _split_rows(usable, data, units)
    order = np.concatenate((train, test))
    items = [usable[row] for row in order]
    images, reasons = read_images([item.path for item in items], input_)
    if noisy:
        _warn_of_left_out(files, len(usable), reasons)
    else:
        _check_unreadable(items, reasons, files, data)
    readable = np.array([reason is None for reason in reasons], bool)
    count = int(readable[: len(train)].sum())  # `images` has the readable ones only: first those for training
    rows = np.flatnonzero(readable)
    halves = []
    for half, place in ((rows[:count], slice(count)), (rows[count:], slice(count, None))):
        split = _examples(items, images, half, place)
        halves.append(split if units is None else replace(split, units=units[order[half]]))
    drawn = all(item.split != "test" for item in items)
    return halves[0], replace(halves[1], drawn=drawn)


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


def _split_rows(items: Sequence[IndexedFile], data: Data, units: Units | None) -> tuple[Indices, Indices]:
    """Indices of the items to train on and to test."""
    train = np.array([row for row, item in enumerate(items) if item.split in (None, "train")], np.int64)
    test = np.array([row for row, item in enumerate(items) if item.split == "test"], np.int64)
    if not len(train) and not len(test):
        raise DataError(f"{data.root} has no images to train on or to test; expected some of the run's classes")
    # With noise the files' own split counts if it has no test image, too: a single one would decide for all others.
    if len(test) or (units is not None and items[0].split is not None):
        refuse_test_fraction(data)
        return train, test
    labels = np.array([items[row].index for row in train])
    group = np.array([items[row].group for row in train]) if items[train[0]].group is not None else None
    stay, drawn = draw_test_rows(labels, group, data, None if units is None else units[train])
    return train[stay], train[drawn]


def _units(items: Sequence[IndexedFile]) -> Units:
    if items and items[0].group is not None:
        return units_of_groups(np.array([item.group for item in items]))
    return units_of_files([item.path for item in items])


def _warn_of_left_out(files: Scan, usable: int, reasons: Sequence[str | None]) -> None:
    """For the site's people alone: in a run with noise no such image may decide whether the site takes part."""
    count = sum(files.unmapped.values()) + len(files.items) - usable + len(files.misplaced)
    if count := count + sum(reason is not None for reason in reasons):
        log.warning("images cannot be used and are left out; `protofed client check` lists them", count=count)


def _check_unreadable(items: Sequence[IndexedFile], reasons: Sequence[str | None], files: Scan, data: Data) -> None:
    unreadable = [(item.name, reason) for item, reason in zip(items, reasons, strict=True) if reason is not None]
    unreadable += [(name, "in no class's folder") for name in files.misplaced]
    count, total = len(unreadable), len(reasons) + len(files.misplaced)
    if count > data.max_unreadable_fraction * total:
        counts = Counter(reason for _, reason in unreadable)
        listed = ", ".join(f"{times} × {reason}" for reason, times in counts.most_common(MOST_REASONS))
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
    columns = ([items[row].site for row in rows], items[0].site), ([items[row].group for row in rows], items[0].group)
    site, group = (None if first is None else np.array(column) for column, first in columns)
    return DataSplit(Examples(torch.from_numpy(images[place]), labels), site, group)
