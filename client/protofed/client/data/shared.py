"""The data of many sites in one block of memory, which processes of one machine share instead of holding copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from mmap import mmap

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from protofed.client.data.augmentation import normaliser
from protofed.client.data.site_data import Examples, SiteData
from protofed.common.config.tables import Input
from protofed.common.payload import SiteId

_ALIGNMENT = 64  # bytes: PyTorch's own, so that every kernel takes the path that it takes for a tensor of its own
Memory = mmap | memoryview
_DTYPES = {str(dtype): dtype for dtype in (torch.uint8, torch.float32, torch.int64)}


class _Listed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _TensorEntry(_Listed):
    start: int  # byte of the block
    dtype: str
    shape: tuple[int, ...]


class _ExamplesEntry(_Listed):
    images: _TensorEntry
    labels: _TensorEntry
    units: _TensorEntry | None
    normalised: _TensorEntry | None


class _SiteEntry(_Listed):
    train: int  # number of the examples
    test: int
    local_test: int | None
    auxiliary: int | None
    scores_only: bool
    own_test: bool


class Contents(_Listed):
    """Where in the block everything stands; sites with a common test set share it here, too."""

    examples: tuple[_ExamplesEntry, ...]
    sites: dict[SiteId, _SiteEntry]
    nbytes: int


def share(data: Mapping[SiteId, SiteData], block: Callable[[int], mmap], *, augmented: bool) -> tuple[Contents, mmap]:
    """Copy the data of sites, on the CPU, into a block, with the normalised images that a site would keep.

    Args:
        block: makes one of so many bytes.
        augmented: training images are taken as they are, so there is no use in normalised ones.
    """
    plan = _Plan(augmented)
    sites = {name: plan.site(site) for name, site in data.items()}
    contents = Contents(examples=tuple(plan.entries), sites=sites, nbytes=plan.size)
    memory = block(contents.nbytes)
    for (examples, input_), entry in zip(plan.examples, contents.examples, strict=True):
        _tensor(memory, entry.images).copy_(examples.images)
        _tensor(memory, entry.labels).copy_(examples.labels)
        if entry.units is not None and examples.units is not None:
            _tensor(memory, entry.units).copy_(examples.units)
        if entry.normalised is not None:
            # Not `Examples.normalised`, which would keep it: of all sites, that is a second copy of the block.
            floats = normaliser(input_, examples.images.dtype, examples.images.device)(examples.images)
            _tensor(memory, entry.normalised).copy_(floats)
    return contents, memory


class Shared:
    """The sites of a block.

    Args:
        memory: of `Contents.nbytes`; nothing is written to it.
    """

    def __init__(self, contents: Contents, memory: Memory, input_: Input, classes: int) -> None:
        self._sites, self._input, self._classes = contents.sites, input_, classes
        self._examples = [self._made(memory, entry) for entry in contents.examples]

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
        )

    def _made(self, memory: Memory, entry: _ExamplesEntry) -> Examples:
        units = None if entry.units is None else _tensor(memory, entry.units)
        examples = Examples(_tensor(memory, entry.images), _tensor(memory, entry.labels), units)
        return (
            examples
            if entry.normalised is None
            else examples.with_normalised(self._input, _tensor(memory, entry.normalised))
        )


class _Plan:
    """Gives everything its place."""

    def __init__(self, augmented: bool) -> None:
        self._augmented, self._numbers = augmented, dict[int, int]()  # by identity
        self.size, self.entries, self.examples = 0, list[_ExamplesEntry](), list[tuple[Examples, Input]]()

    def site(self, site: SiteData) -> _SiteEntry:
        train = self._number(site.train, site.input, normalised=not self._augmented)
        test = self._number(site.test, site.input)
        local, auxiliary = (
            None if examples is None else self._number(examples, site.input)
            for examples in (site.local_test, site.auxiliary)
        )
        flags = {"scores_only": site.scores_only, "own_test": site.own_test}
        return _SiteEntry(train=train, test=test, local_test=local, auxiliary=auxiliary, **flags)

    def _number(self, examples: Examples, input_: Input, *, normalised: bool = True) -> int:
        if id(examples) not in self._numbers:
            self._numbers[id(examples)] = len(self.entries)
            images, labels = (self._place(tensor.dtype, tensor.shape) for tensor in (examples.images, examples.labels))
            units = None if examples.units is None else self._place(examples.units.dtype, examples.units.shape)
            has_floats = normalised and len(examples) and examples.kept_bytes
            floats = self._place(torch.float32, examples.images.shape) if has_floats else None
            self.entries.append(_ExamplesEntry(images=images, labels=labels, units=units, normalised=floats))
            self.examples.append((examples, input_))
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
