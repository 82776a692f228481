"""Images with their labels. Views of one array share it: a part of the examples copies no image."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from blake3 import blake3
from torch import Tensor

from protofed.client.data.augmentation import UNITS, normaliser
from protofed.client.data.image_cache import CachedImages
from protofed.client.task import ClientTask
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

T = TypeVar("T")
CONTRAST_IMAGES = 256
KEPT_BYTES = 64 << 20  # a normalised copy of an array up to this size is kept; others are made batch by batch
PART_BYTES = 64 << 20  # of images that are read at a time where all are passed


@dataclass(frozen=True, eq=False)
class Examples:
    """Images and their labels.

    Attributes:
        images: [M, channels, H, W], uint8, uint16 (65535 is white), or float32 in 0..1; views share it.
        labels: the task's targets, [N, ...]; of classes [N], int64.
        units: the number of the patient of each example, [N] int64 on the CPU: what noise protects as a whole, and of a
            test set what is resampled as a whole; None: each example is one of its own.
        rows: which of `images` the examples are, [N] int64 on the CPU; None: all, in their order.
        source: the cache on disk that `images` are mapped from; None: they are in memory.
        shared: what was made of `images` once, for all views.
        subgroups: by name, as "sex=F", which of the examples are in it, [N] bool on the CPU.

    Raises:
        DataError: shapes or dtypes are others.
    """

    images: Tensor
    labels: Tensor
    units: Tensor | None = None
    rows: Tensor | None = None
    source: CachedImages | None = None
    shared: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    subgroups: Mapping[str, Tensor] = field(default_factory=dict)
    _results: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)  # the results of `once`

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if self.shared.setdefault("made of", images) is not images:  # replaced: nothing of the former ones is of these
            object.__setattr__(self, "shared", {"made of": images})
        if images.ndim != 4 or images.dtype not in UNITS:
            raise DataError(
                f"images are {images.dtype} of shape {list(images.shape)}; "
                "expected uint8, uint16, or float32 in 0..1, of shape [N, channels, height, width]"
            )
        count = len(images) if self.rows is None else len(self.rows)
        if labels.shape[:1] != (count,):
            raise DataError(f"labels are of shape {list(labels.shape)}; expected one for each of {count} images")
        if self.units is not None and (self.units.dtype, self.units.shape) != (torch.int64, (count,)):
            raise DataError(
                f"units are {self.units.dtype} of shape {list(self.units.shape)}; expected int64, one an image"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> Examples:
        """A view of the examples of these indices, [n] int64 on the CPU, in this order."""
        labels = self.labels.index_select(0, indices.to(self.labels.device))
        units = None if self.units is None else self.units.index_select(0, indices)
        subgroups = {name: inside.index_select(0, indices) for name, inside in self.subgroups.items()}
        return replace(self, labels=labels, units=units, rows=self.rows_at(indices), subgroups=subgroups)

    def rows_at(self, indices: Tensor) -> Tensor:
        """The rows in `images` of these examples, [n] int64 each, on the CPU."""
        return indices if self.rows is None else self.rows.index_select(0, indices)

    def pixels(self) -> Tensor:
        """The images [N, channels, H, W] as they are stored; of a view a copy in memory."""
        return self.images if self.rows is None else self.read(self.rows)

    def read(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """These rows [B] int64 of `images`, as of `select`; those of a cache come from the disk together."""
        if self.source is not None:
            self.source.read_ahead(rows.tolist())
        return select(self.images, rows, out)

    def parts(self, size: int | None = None) -> Iterator[Tensor]:
        """The images in their order, in parts [B, channels, H, W] of `size`, or of `PART_BYTES`."""
        size = size or max(1, PART_BYTES // max(1, self.image_bytes))
        if self.rows is None:
            yield from (part for part in torch.split(self.images, size) if len(part))
        else:
            yield from (self.read(rows) for rows in torch.split(self.rows, size) if len(rows))

    def compact(self) -> Examples:
        """The same examples without the rest of an array in memory, which is a copy of their images."""
        if self.rows is None or self.source is not None:
            return self
        return Examples(self.pixels(), self.labels, self.units, subgroups=self.subgroups)

    def sample(self, count: int, seed: int, strata: Callable[[Tensor], Tensor]) -> Examples:
        """At most so many of the examples, drawn once as by `stratified_sample`; these ones, if there are not more.

        Args:
            strata: as of the task.
        """
        if count >= len(self):
            return self
        drawn = partial(stratified_sample, count=count, seed=seed)
        return self.once(("sample", count, seed), lambda: self.take(drawn(strata(self.labels.cpu()))))

    def on(self, device: torch.device) -> Examples:
        """The same examples on a device, moved there once: an array in memory for all of its views."""
        if self.images.device == device:
            return self
        return self.once(("on", device), lambda: self._moved(device))

    def is_on(self, device: torch.device) -> bool:
        """Whether `on` this device takes no more of its memory."""
        return self.images.device == device or ("on", device) in (self._results if self.source else self.shared)

    def _moved(self, device: torch.device) -> Examples:
        labels = self.labels.to(device)
        if self.source is not None:  # a cache may have more images than these
            images = torch.empty((len(self), *self.images.shape[1:]), dtype=self.images.dtype, device=device)
            start = 0
            for part in self.parts():
                images[start : start + len(part)] = part
                start += len(part)
            return Examples(images, labels, self.units, subgroups=self.subgroups)
        images, shared = self._once_for_all(("on", device), lambda: (self.images.to(device), dict[Hashable, Any]()))
        return replace(self, images=images, labels=labels, shared=shared)

    def normalised(self, input_: Input) -> Tensor:
        """The images as the model takes them, float32 [N, channels, H, W]; of a view a copy."""
        if self.source is not None:  # a cache may have more images than these
            return normaliser(input_, self.images.dtype, self.images.device)(self.pixels())
        whole = self.normalised_array(input_)
        return whole if self.rows is None else select(whole, self.rows)

    def normalised_array(self, input_: Input) -> Tensor:
        """All of `images` as the model takes them, float32 [M, channels, H, W], made once for all views."""
        finish = normaliser(input_, self.images.dtype, self.images.device)
        return self._once_for_all(_normalised(input_), lambda: finish(self.images))

    def frequencies(self, classes: int, device: torch.device) -> Tensor:
        """The share of each class among the labels, [C] float32 on a device, counted once."""

        def counted() -> Tensor:
            counts = self.labels.bincount(minlength=classes)
            return (counts / max(len(self), 1)).to(device)

        return self.once(("frequencies", classes, device), counted)

    def fingerprint(self) -> bytes:
        """BLAKE3 of images, labels and units: equal for equal examples, on every device and disk."""

        def made() -> bytes:
            digest = blake3(f"{self.images.dtype}{[len(self), *self.images.shape[1:]]}".encode())
            for part in self.parts():
                digest.update(part.cpu().numpy().tobytes())
            for tensor in (self.labels, *(() if self.units is None else (self.units,))):
                digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
                digest.update(tensor.cpu().numpy().tobytes())
            return digest.digest()

        return self.once("fingerprint", made)

    def digests(self) -> Iterator[bytes]:
        """BLAKE2b of each image, 16 bytes: equal for equal images."""
        for part in self.parts():
            yield from (hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in part.cpu().numpy())

    def contrast(self) -> float:
        """By how much two images typically differ: the median root mean square over pairs, of pixels in 0..1.

        Of `CONTRAST_IMAGES` at most, evenly chosen, each with the one before it; infinite for a single image.
        """
        if len(self) < 2:
            return math.inf
        chosen = torch.linspace(0, len(self) - 1, min(len(self), CONTRAST_IMAGES)).long()
        images = self.read(self.rows_at(chosen)).flatten(1)
        pixels = images.float() / UNITS[images.dtype]
        return float(pixels.diff(dim=0).square().mean(1).sqrt().median())

    @property
    def image_bytes(self) -> int:
        """Bytes of one image."""
        return self.images.dtype.itemsize * math.prod(self.images.shape[1:])

    @property
    def kept_bytes(self) -> int:
        """Size of `normalised_array` in bytes; 0: it is not kept, and so made batch by batch."""
        size = 4 * self.images.numel()
        return size if size <= KEPT_BYTES and self.source is None else 0

    @property
    def nbytes(self) -> int:
        """Bytes in memory of the array of images, its normalised copy and the labels; of mapped images in a copy."""
        images = self.images.nbytes if self.source is None else len(self) * self.image_bytes
        return images + self.labels.nbytes + self.kept_bytes

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made at the first call with this key and kept as long as the examples."""
        if key not in self._results:
            self._results[key] = make()
        result: T = self._results[key]
        return result

    def _once_for_all(self, key: Hashable, make: Callable[[], T]) -> T:
        """As `once`, kept as long as any view of the array."""
        if key not in self.shared:
            self.shared[key] = make()
        result: T = self.shared[key]
        return result


def _normalised(input_: Input) -> Hashable:
    return "normalised", input_.mean, input_.std


def with_normalised(input_: Input, images: Tensor) -> dict[Hashable, Any]:
    """`Examples.shared`, given what `normalised_array` would make, float32 [M, channels, H, W]."""
    return {_normalised(input_): images}


def as_tensor(images: CachedImages) -> Tensor:
    """[M, channels, H, W], mapped from the cache; nothing may be written to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(images.open())


def select(values: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """The rows [B] int64 of values [M, ...], on the values' device; into `out` [B, ...], if given."""
    rows = rows.to(values.device)
    if values.dtype != torch.uint16:
        return torch.index_select(values, 0, rows, out=out)
    # Few kernels know uint16; the bits are the same.
    bits = torch.index_select(values.view(torch.int16), 0, rows, out=None if out is None else out.view(torch.int16))
    return bits.view(torch.uint16)


def join(first: Examples, second: Examples) -> Examples:
    """The examples of both, in this order, without units and subgroups; views of one array stay views."""
    labels = torch.cat((first.labels, second.labels))
    if first.images is second.images:
        all_rows = [each.rows_at(torch.arange(len(each))) for each in (first, second)]
        return replace(first, labels=labels, units=None, rows=torch.cat(all_rows), subgroups={})
    return Examples(torch.cat((first.pixels(), second.pixels())), labels)


def total_bytes(sets: Iterable[Examples], device: torch.device | None = None) -> int:
    """Bytes that these examples take, or would still take on a device; views of one array in memory take it once."""
    missing = [examples for examples in sets if device is None or not examples.is_on(device)]
    return sum({id(each.shared if each.source is None else each): each.nbytes for each in missing}.values())


def no_examples(input_: Input, like: Tensor | None = None) -> Examples:
    """No examples, [0, channels, H, W] of the run's input.

    Args:
        like: targets [N, ...] that theirs are to be like; None: classes.
    """
    labels = torch.empty(0, dtype=torch.int64) if like is None else like[:0]
    return Examples(torch.empty(0, *input_.shape, dtype=torch.uint8), labels)


def check_shape(examples: Examples, input_: Input) -> None:
    """Check that the images have the run's input shape; nothing is resized or repeated silently.

    Raises:
        DataError: naming both shapes.
    """
    if examples.images.shape[1:] != input_.shape:
        raise DataError(
            f"images are {list(examples.images.shape[1:])} [channels, height, width], but the run's input.shape is "
            f"{list(input_.shape)}; convert the data or take part in a run of their shape"
        )


def check_labels(examples: Examples, task: ClientTask, classes: int) -> None:
    """Check that labels are targets that a model with so many outputs can learn.

    Raises:
        DataError: naming what was expected.
    """
    labels = examples.labels
    if task.valid(labels, classes).all():
        return
    if labels.isnan().any():
        found = f"{int(labels.isnan().sum())} of {labels.numel()} labels are NaN"
    elif labels.ndim == 1:
        found = f"labels are {labels.min():g} to {labels.max():g}"
    else:
        found = f"labels are {labels.dtype} of shape {list(labels.shape)}"
    raise DataError(f"{found}, but {task.expected(classes)}")


# Samples that take its share of each class.


def stratified_sample(labels: Tensor, count: int, seed: int) -> Tensor:
    """Indices [count] int64, ascending, of examples drawn from each class by its share; one of each class at least.

    A class is a stratum of the task's (`ClientTask.strata`). Equal labels, count and seed give equal indices, so that
    sites with one test set are scored on the same images. All indices, if there are not more; as many as there are
    classes, if `count` is less.

    Args:
        labels: [N] int64, on the CPU.
    """
    if count >= len(labels):
        return torch.arange(len(labels))
    by_class, place, totals = _shuffled(labels, seed)
    quotas = _allotted(totals, count)
    return by_class[place < quotas[labels[by_class]]].sort().values


def stratified_share(labels: Tensor, fraction: float) -> Tensor:
    """[N] bool: this share of each class's examples, rounded down, drawn by a seed of its own; equal for equal labels.

    Args:
        labels: [N] int64, on the CPU.
    """
    by_class, place, totals = _shuffled(labels, "share")
    mask = torch.zeros(len(labels), dtype=torch.bool)
    mask[by_class] = place < (fraction * totals[labels[by_class]].double()).floor()
    return mask


def _shuffled(labels: Tensor, seed: int | str) -> tuple[Tensor, Tensor, Tensor]:
    """[N] indices class by class, in random order within each; their places within their class; [C] the totals."""
    digest = hashlib.blake2b(f"stratified/{seed}".encode(), digest_size=7).digest()
    drawn = torch.randperm(len(labels), generator=torch.Generator().manual_seed(int.from_bytes(digest, "big")))
    by_class, totals = drawn[labels[drawn].argsort(stable=True)], labels.bincount()
    return by_class, torch.arange(len(labels)) - (totals.cumsum(0) - totals)[labels[by_class]], totals


def _allotted(totals: Tensor, count: int) -> Tensor:
    """[C] int64: how many examples of each class are taken, by largest remainders; `count` is below their sum."""
    share = count * totals.double() / totals.sum()
    quotas = share.floor().long().maximum((totals > 0).long())
    missing = count - int(quotas.sum())
    if missing > 0:
        quotas[(share - quotas).argsort(descending=True, stable=True)[:missing]] += 1
    for _ in range(-missing):  # rare classes were given one each: the classes that are above their share by most pay
        excess = (quotas - share).masked_fill(quotas < 2, -torch.inf)
        if excess.max() > -torch.inf:
            quotas[int(excess.argmax())] -= 1
    return quotas
