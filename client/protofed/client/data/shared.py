"""The data of many sites in one block of memory, which processes of one machine share instead of holding copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from protofed.client.data.augmentation import normaliser
from protofed.client.data.examples import Examples, as_tensor, with_normalised
from protofed.client.data.image_cache import CachedImages
from protofed.client.data.site_data import SiteData
from protofed.client.task import ClientTask
from protofed.client.tasks.classification import CLASSES
from protofed.common.config.tables import Input
from protofed.common.payload import SiteId

_ALIGNMENT = 64  # bytes: PyTorch's own, so that every kernel takes the path that it takes for a tensor of its own
Memory = mmap | memoryview
_DTYPES = {str(dtype): dtype for dtype in (torch.bool, torch.uint8, torch.uint16, torch.float32, torch.int64)}


class _Listed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _TensorEntry(_Listed):
    start: int  # byte of the block
    dtype: str
    shape: tuple[int, ...]


class _FileEntry(_Listed):
    path: Path
    bits: int
    shape: tuple[int, int, int, int]


class _ArrayEntry(_Listed):
    images: _TensorEntry | _FileEntry
    normalised: _TensorEntry | None


class _ExamplesEntry(_Listed):
    array: int  # its number
    rows: _TensorEntry | None
    labels: _TensorEntry
    units: _TensorEntry | None
    subgroups: dict[str, _TensorEntry]


class _SiteEntry(_Listed):
    train: int  # number of the examples
    test: int
    local_test: int | None
    auxiliary: int | None
    scores_only: bool
    own_test: bool


class Contents(_Listed):
    """Where in the block everything stands; views of one array share it here, too."""

    arrays: tuple[_ArrayEntry, ...]
    examples: tuple[_ExamplesEntry, ...]
    sites: dict[SiteId, _SiteEntry]
    nbytes: int


def share(data: Mapping[SiteId, SiteData], block: Callable[[int], mmap], *, augmented: bool) -> tuple[Contents, mmap]:
    """Copy the data of sites, on the CPU, into a block, with the normalised images that a site would keep.

    Images that are mapped from a cache stay there.

    Args:
        block: makes one of so many bytes.
        augmented: training images are taken as they are, so there is no use in normalised ones.
    """
    plan = _Plan(augmented)
    sites = {name: plan.site(site) for name, site in data.items()}
    contents = Contents(arrays=tuple(plan.arrays()), examples=tuple(plan.entries), sites=sites, nbytes=plan.size)
    memory = block(contents.nbytes)
    for (examples, input_), array in zip(plan.owners.values(), contents.arrays, strict=True):
        if isinstance(array.images, _TensorEntry):
            _tensor(memory, array.images).copy_(examples.images)
        if array.normalised is not None:
            # Not `Examples.normalised_array`, which would keep it: that is a second copy of the block.
            floats = normaliser(input_, examples.images.dtype, examples.images.device)(examples.images)
            _tensor(memory, array.normalised).copy_(floats)
    for examples, entry in zip(plan.examples, contents.examples, strict=True):
        for values, place in (
            (examples.rows, entry.rows),
            (examples.labels, entry.labels),
            (examples.units, entry.units),
            *((inside, entry.subgroups[name]) for name, inside in examples.subgroups.items()),
        ):
            if values is not None and place is not None:
                _tensor(memory, place).copy_(values)
    return contents, memory


class Shared:
    """The sites of a block.

    Args:
        memory: of `Contents.nbytes`; nothing is written to it.
    """

    def __init__(
        self, contents: Contents, memory: Memory, input_: Input, classes: int, task: ClientTask = CLASSES
    ) -> None:
        self._sites, self._input, self._classes, self._task = contents.sites, input_, classes, task
        self._memory = memory
        self._arrays = [self._opened(entry) for entry in contents.arrays]
        self._examples = [self._made(entry) for entry in contents.examples]

    def site(self, name: SiteId) -> SiteData:
        """The data of a site; its tensors are the block's."""
        entry = self._sites[name]
        train, test = self._examples[entry.train], self._examples[entry.test]
        local, auxiliary = (
            None if number is None else self._examples[number] for number in (entry.local_test, entry.auxiliary)
        )
        return SiteData(
            train,
            test,
            self._input,
            self._classes,
            scores_only=entry.scores_only,
            local_test=local,
            auxiliary=auxiliary,
            own_test=entry.own_test,
            task=self._task,
        )

    def _opened(self, entry: _ArrayEntry) -> _Array:
        if isinstance(entry.images, _FileEntry):
            source = CachedImages(entry.images.path, entry.images.bits, entry.images.shape)
            return _Array(as_tensor(source), source, {})
        array = _Array(_tensor(self._memory, entry.images), None, {})
        if entry.normalised is not None:
            floats = _tensor(self._memory, entry.normalised)
            array.shared.update(with_normalised(self._input, floats))
        return array

    def _made(self, entry: _ExamplesEntry) -> Examples:
        images, source, shared = self._arrays[entry.array]
        rows, units = (None if place is None else _tensor(self._memory, place) for place in (entry.rows, entry.units))
        subgroups = {name: _tensor(self._memory, place) for name, place in entry.subgroups.items()}
        return Examples(images, _tensor(self._memory, entry.labels), units, rows, source, shared, subgroups)


class _Array(NamedTuple):
    images: Tensor
    source: CachedImages | None
    shared: dict[Hashable, Any]


class _Plan:
    """Gives everything its place."""

    def __init__(self, augmented: bool) -> None:
        self._augmented, self._numbers = augmented, dict[int, int]()  # by identity
        self.size, self.entries, self.examples = 0, list[_ExamplesEntry](), list[Examples]()
        self.owners: dict[int, tuple[Examples, Input]] = {}  # one of the examples of each array, by its identity
        self._kept = set[int]()  # arrays with a use for normalised images

    def site(self, site: SiteData) -> _SiteEntry:
        train = self._number(site.train, site.input, normalised=not self._augmented)
        test = self._number(site.test, site.input)
        local, auxiliary = (
            None if examples is None else self._number(examples, site.input)
            for examples in (site.local_test, site.auxiliary)
        )
        flags = {"scores_only": site.scores_only, "own_test": site.own_test}
        return _SiteEntry(train=train, test=test, local_test=local, auxiliary=auxiliary, **flags)

    def arrays(self) -> Iterator[_ArrayEntry]:
        """Once all sites have their places."""
        for array, (examples, _) in self.owners.items():
            if (source := examples.source) is not None:
                yield _ArrayEntry(images=_FileEntry(**vars(source)), normalised=None)
                continue
            images = self._place(examples.images.dtype, examples.images.shape)
            has_floats = array in self._kept and examples.kept_bytes
            floats = self._place(torch.float32, examples.images.shape) if has_floats else None
            yield _ArrayEntry(images=images, normalised=floats)

    def _number(self, examples: Examples, input_: Input, *, normalised: bool = True) -> int:
        array = id(examples.shared)
        self.owners.setdefault(array, (examples, input_))
        if normalised and len(examples):
            self._kept.add(array)
        if id(examples) not in self._numbers:
            self._numbers[id(examples)] = len(self.entries)
            rows, labels, units = (
                None if values is None else self._place(values.dtype, values.shape)
                for values in (examples.rows, examples.labels, examples.units)
            )
            number = list(self.owners).index(array)
            inside = {name: self._place(each.dtype, each.shape) for name, each in examples.subgroups.items()}
            self.entries.append(_ExamplesEntry(array=number, rows=rows, labels=labels, units=units, subgroups=inside))
            self.examples.append(examples)
        return self._numbers[id(examples)]

    def _place(self, dtype: torch.dtype, shape: torch.Size) -> _TensorEntry:
        entry = _TensorEntry(start=self.size, dtype=str(dtype), shape=tuple(shape))
        self.size += math.ceil(dtype.itemsize * math.prod(shape) / _ALIGNMENT) * _ALIGNMENT
        return entry


def _tensor(memory: Memory, entry: _TensorEntry) -> Tensor:
    dtype, count = _DTYPES[entry.dtype], math.prod(entry.shape)
    if not count:  # `frombuffer` takes no empty one
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.start).view(entry.shape)
