"""Batches from the cache on the disk beside those from memory, a bare PyTorch `DataLoader` and bare reads of the disk.

Ratios of the clock, in turns. Images as a clinic has them: 224 x 224 in colour, each batch normalised to float32.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from tests.bench.report import Row
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from protofed.client.data.augmentation import normaliser
from protofed.client.data.examples import Examples, as_tensor
from protofed.client.data.image_cache import CachedImages
from protofed.client.data.site_data import SiteData
from protofed.common.config.tables import Input

INPUT = Input(shape=(3, 224, 224))
COUNT, BATCH, TURNS = 2048, 32, 5
GOAL = 0.95  # of the images a second from memory, where the page cache holds the file
ROW = 3 * 224 * 224
Epoch = Callable[[], object]


class Mapped(Dataset[tuple[Tensor, int]]):
    """What one writes by hand for a file of images: one image a call."""

    def __init__(self, images: CachedImages) -> None:
        self._images = images.open()
        self._finish = normaliser(INPUT, torch.uint8, torch.device("cpu"))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self._finish(torch.from_numpy(np.array(self._images[row]))), row % 10


def rows() -> Iterator[Row]:
    """Images a second of an epoch without a model: what feeding alone allows."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as folder:  # not /tmp, which may be memory
        images = written(Path(folder) / "8.bin")
        labels = torch.arange(COUNT) % 10
        cached, here = (
            data(Examples(tensor, labels, source=source))
            for tensor, source in ((as_tensor(images), images), (as_tensor(images).clone(), None))
        )
        loader = DataLoader(Mapped(images), BATCH, shuffle=True, num_workers=len(os.sched_getaffinity(0)))
        ours, memory, bare = in_turns(lambda: epoch(cached), lambda: epoch(here), lambda: all_of(loader))
        size = "224 x 224 x 3"
        yield _row(f"batches of {size} from the cache", ours, memory, "from memory", at_least=GOAL)
        yield _row(f"batches of {size} from the cache, by hand", ours, bare, "PyTorch DataLoader", at_least=1.0)
        # A page that is mapped cannot be forgotten: another file, which each epoch maps anew.
        other = written(Path(folder) / "other.bin")
        cold, floor = in_turns(
            lambda: epoch(data(Examples(as_tensor(other), labels, source=other))),
            lambda: read(other),
            before=lambda: forget(other.path),
        )
        yield _row(f"batches of {size} from a cold cache", cold, floor, "bare reads", at_least=1.0)


def _row(what: str, figure: float, beside: float, beside_what: str, at_least: float) -> Row:
    return Row(what, figure, "images/s", beside, beside_what, figure / beside, at_least=at_least)


def data(examples: Examples) -> SiteData:
    """A site's data on the CPU."""
    return SiteData(examples, examples.take(torch.arange(1)), INPUT, 10)


def written(path: Path) -> CachedImages:
    """Random images in a file as a cache has it."""
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for _ in range(COUNT):
            file.write(rng.bytes(ROW))
        os.fsync(file.fileno())
    return CachedImages(path, 8, (COUNT, *INPUT.shape))


def in_turns(*epochs: Epoch, before: Callable[[], None] = lambda: None) -> list[float]:
    """The median of each one's images a second."""
    found: list[list[float]] = [[] for _ in epochs]
    for _ in range(TURNS):
        for run, rates in zip(epochs, found, strict=True):
            before()
            started = time.perf_counter()
            run()
            rates.append(COUNT / (time.perf_counter() - started))
    return [statistics.median(rates) for rates in found]


def epoch(site: SiteData) -> None:
    """All batches of one epoch."""
    for _ in site.batches(BATCH, torch.Generator().manual_seed(0)):
        pass


def all_of(loader: DataLoader[tuple[Tensor, int]]) -> None:
    """All batches of a loader."""
    for _ in loader:
        pass


def read(images: CachedImages) -> None:
    """Every row once, in random order, by one thread."""
    handle = os.open(images.path, os.O_RDONLY)
    for row in torch.randperm(COUNT, generator=torch.Generator().manual_seed(0)).tolist():
        os.pread(handle, ROW, row * ROW)
    os.close(handle)


def forget(path: Path) -> None:
    """Have the kernel drop what it holds of a file."""
    handle = os.open(path, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
