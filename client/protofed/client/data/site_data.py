"""A site's examples as methods use them: normalised batches on its device, in the same order on every device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import torch
from blake3 import blake3
from torch import Tensor

from protofed.client.data.augmentation import Augmentation, build_augmentation, normaliser
from protofed.client.device import page_locked
from protofed.common.config.recipe import AugmentationSetting, Sampling
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

Batch: TypeAlias = tuple[Tensor, Tensor]  # [B, channels, H, W] normalised float32, [B] int64, on the site's device
T = TypeVar("T")

CPU = torch.device("cpu")
CONTRAST_IMAGES = 256
KEPT_BYTES = 1 << 30  # a normalised copy up to this size is kept; a larger one is made batch by batch


@dataclass(frozen=True, eq=False)
class Examples:
    """Images and their labels. Sites with a common test set share one object, and so its copies on devices.

    Attributes:
        images: [N, channels, H, W], uint8, or float32 in 0..1.
        labels: [N], int64.
        units: the number of the patient of each example, [N] int64 on the CPU: what noise protects as a whole; None:
            each example is one of its own.

    Raises:
        DataError: shapes or dtypes are others.
    """

    images: Tensor
    labels: Tensor
    units: Tensor | None = None
    _results: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)  # the results of `once`

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.ndim != 4 or images.dtype not in (torch.uint8, torch.float32):
            raise DataError(
                f"images are {images.dtype} of shape {list(images.shape)}; "
                "expected uint8, or float32 in 0..1, of shape [N, channels, height, width]"
            )
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise DataError(
                f"labels are {labels.dtype} of shape {list(labels.shape)}; expected int64, one for each of "
                f"{len(images)} images"
            )
        if self.units is not None and (self.units.dtype, self.units.shape) != (torch.int64, labels.shape):
            raise DataError(
                f"units are {self.units.dtype} of shape {list(self.units.shape)}; expected int64, one an image"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> Examples:
        """A copy of the examples of these indices, [n] int64 on the images' device, in this order."""
        units = None if self.units is None else self.units.index_select(0, indices.cpu())
        return Examples(self.images.index_select(0, indices), self.labels.index_select(0, indices), units)

    def sample(self, count: int, seed: int) -> Examples:
        """At most so many of the examples, drawn once as by `stratified_sample`; these ones, if there are not more."""
        if count >= len(self):
            return self

        def drawn() -> Examples:
            return self.take(stratified_sample(self.labels.cpu(), count, seed).to(self.images.device))

        return self.once(("sample", count, seed), drawn)

    def on(self, device: torch.device) -> Examples:
        """The same examples on a device, moved there once."""
        if self.images.device == device:
            return self
        return self.once(
            ("on", device), lambda: replace(self, images=self.images.to(device), labels=self.labels.to(device))
        )

    def normalised(self, input_: Input) -> Tensor:
        """All images as the model takes them, float32 [N, channels, H, W], made once."""
        key = ("normalised", input_.mean, input_.std)
        return self.once(key, lambda: normaliser(input_, self.images.dtype, self.images.device)(self.images))

    def with_normalised(self, input_: Input, images: Tensor) -> Examples:
        """These examples, given what `normalised` would make, float32 [N, channels, H, W]."""
        self.once(("normalised", input_.mean, input_.std), lambda: images)
        return self

    def frequencies(self, classes: int, device: torch.device) -> Tensor:
        """The share of each class among the labels, [C] float32 on a device, counted once."""

        def counted() -> Tensor:
            counts = self.labels.bincount(minlength=classes)
            return (counts / max(len(self), 1)).to(device)

        return self.once(("frequencies", classes, device), counted)

    def fingerprint(self) -> bytes:
        """BLAKE3 of images, labels and units: equal for equal examples, on every device."""

        def made() -> bytes:
            digest = blake3()
            for tensor in (self.images, self.labels, *(() if self.units is None else (self.units,))):
                digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
                digest.update(tensor.cpu().contiguous().numpy().tobytes())
            return digest.digest()

        return self.once("fingerprint", made)

    def contrast(self) -> float:
        """By how much two images typically differ: the median root mean square over pairs, of pixels in 0..1.

        Of `CONTRAST_IMAGES` at most, evenly chosen, each with the one before it; infinite for a single image.
        """
        if len(self) < 2:
            return math.inf
        chosen = torch.linspace(0, len(self) - 1, min(len(self), CONTRAST_IMAGES)).long()
        images = self.images[chosen.to(self.images.device)].flatten(1)
        pixels = images.float() / (1.0 if images.is_floating_point() else 255.0)
        return float(pixels.diff(dim=0).square().mean(1).sqrt().median())

    @property
    def kept_bytes(self) -> int:
        """Size of `normalised` in bytes; 0: it is above `KEPT_BYTES`, and so made batch by batch."""
        size = 4 * self.images.numel()
        return size if size <= KEPT_BYTES else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the images and labels, and of the normalised copy."""
        return self.images.nbytes + self.labels.nbytes + self.kept_bytes

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made at the first call with this key and kept as long as the examples."""
        if key not in self._results:
            self._results[key] = make()
        result: T = self._results[key]
        return result


def no_examples(input_: Input) -> Examples:
    """No examples, [0, channels, H, W] of the run's input."""
    return Examples(torch.empty(0, *input_.shape, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))


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


@dataclass(frozen=True, eq=False)
class SiteData:
    """One site's data.

    Attributes:
        train: what the site trains on; never empty, unless it only scores.
        test: the common test set, for all sites' models; empty only if there is a `local_test` and no common one, or
            none could be held out of a site's own images in a run with noise.
        input: shape and normalisation of the run's images.
        classes: C of the run, over all sites.
        device: where batches are made.
        scores_only: an evaluator's data, without training examples.
        local_test: a test set of the site's own class distribution, for its own model; None or not empty.
        auxiliary: public images with labels, to refine models on; None or not empty, and in none of the test sets.
        own_test: in a run with noise: what it is scored on was held out of the site's own images, which no noise hides.

    Raises:
        DataError: no examples, images of another shape than the run's, or labels outside 0..classes - 1.
    """

    train: Examples
    test: Examples
    input: Input
    classes: int
    device: torch.device = CPU
    scores_only: bool = False
    local_test: Examples | None = None
    auxiliary: Examples | None = None
    own_test: bool = False

    def __post_init__(self) -> None:
        for name, examples, may_be_empty in (
            ("training", self.train, self.scores_only),
            ("test", self.test, self.local_test is not None or self.own_test),
            ("local test", self.local_test, False),
            ("auxiliary", self.auxiliary, False),
        ):
            if examples is None:
                continue
            if not len(examples) and not may_be_empty:
                raise DataError(f"there are no {name} examples; expected at least one")
            check_shape(examples, self.input)
            check_labels(examples, self.classes)

    @classmethod
    def for_scoring(cls, test: Examples, input_: Input, classes: int, auxiliary: Examples | None = None) -> SiteData:
        """The data of an evaluator: a test set, and what it may refine models on."""
        return cls(no_examples(input_), test, input_, classes, scores_only=True, auxiliary=auxiliary)

    def for_refining(self) -> SiteData:
        """Data with the auxiliary images alone: a method sees neither the site's own nor a test set.

        Raises:
            DataError: there are none.
        """
        if self.auxiliary is None:
            raise DataError(
                "there are no auxiliary images to refine a model on. Set data.auxiliary_per_class in this site's "
                "settings, for public images only"
            )
        return SiteData(self.auxiliary, self.auxiliary, self.input, self.classes, self.device)

    def placed(self, device: torch.device) -> SiteData:
        """The same data for training on `device`: moved there if it fits, else batch by batch from where it is.

        Sites that share a test set share it there, too.
        """
        extras = self.local_test, self.auxiliary
        size = sum(examples.nbytes for examples in (self.train, self.test, *extras) if examples is not None)
        if device.type == "cuda" and not fits(size, device):
            return replace(self, device=device)
        local, auxiliary = (None if examples is None else examples.on(device) for examples in extras)
        train, test = self.train.on(device), self.test.on(device)
        return replace(self, train=train, test=test, local_test=local, auxiliary=auxiliary, device=device)

    def held_out(self, fraction: float) -> tuple[SiteData, Examples]:
        """These data without a part of the training examples, and that part, for a method to compare models on.

        Always the same part, as long as the site's examples are: a model that is judged by it was never trained on it.
        Each class gives this share of its examples, rounded down; so the part may be empty.
        """

        def drawn() -> tuple[Examples, Examples]:
            labels = self.train.labels.cpu()
            mask = stratified_share(labels, fraction).to(self.train.images.device)
            return self.train.take((~mask).nonzero().flatten()), self.train.take(mask.nonzero().flatten())

        train, held_out = self.train.once(("held out", fraction), drawn)
        return replace(self, train=train), held_out

    def batches(
        self,
        size: int,
        rng: torch.Generator,
        augmentation: AugmentationSetting = "none",
        drop_last: bool = False,
        sampling: Sampling = "shuffled",
    ) -> Iterator[Batch]:
        """One epoch: the training examples, shuffled; or as many draws of them, with each class as often.

        All random numbers are drawn at the call, on the CPU, so that every device sees the same batches.

        Args:
            size: examples a batch; all of them if there are fewer.
            rng: of the CPU.
            augmentation: as `plan.augmentation`.
            drop_last: leave out a last batch that is smaller than the others.
            sampling: of the examples.

        Raises:
            DataError: an evaluator's data, which has nothing to train on.
        """
        count = len(self.train)
        if not count:
            raise DataError("this data has only test examples; expected a trainer's data")
        size = min(size, count)
        order = torch.randperm(count, generator=rng)
        if sampling == "class-balanced":
            order = class_balanced(self.train.labels.cpu(), order, rng)
        order = order[: count - count % size if drop_last else count]
        if augmentation == "none":
            return self._plain(order, size)
        transform = build_augmentation(augmentation)
        return self._augmented(order, size, transform, transform.draw(len(order), rng))

    def at(self, rows: Tensor, augmentation: AugmentationSetting = "none", moves: Tensor | None = None) -> Batch:
        """The training examples of these rows, [B] int64 on the CPU, B at least 1, in this order.

        Args:
            augmentation: as `plan.augmentation`.
            moves: what its `draw` gave for these rows, on the CPU; None: none.
        """
        if augmentation == "none" or moves is None:
            return next(self._plain(rows, len(rows)))
        return next(self._augmented(rows, len(rows), build_augmentation(augmentation), moves))

    def ordered(self, examples: Examples, size: int) -> Iterator[Batch]:
        """One pass over `examples` of this site in their order, without augmentation: for scores and class means."""
        images, finish = self._prepared(examples)
        for batch, labels in zip(torch.split(images, size), torch.split(examples.labels, size), strict=True):
            if len(labels):
                yield finish(self._moved(batch)), self._moved(labels)

    def label_frequencies(self) -> Tensor:
        """n_{k,c} / n_k of the training labels, [C] float32 on the device, to be read only. They are never sent."""
        # Counted once: a loss asks in each step, and a GPU would be waited for.
        return self.train.frequencies(self.classes, self.device)

    def unscored(self, test: Examples | None) -> list[int]:
        """The classes that `test` has no example of, of those that the site trains on; an evaluator's: of the run's.

        They tell which classes are rare here, and are never sent.

        Args:
            test: `test` or `local_test`; None: none could be held out.
        """
        own = torch.ones(self.classes) if self.scores_only else self.label_frequencies().cpu()
        tested = no_examples(self.input).labels if test is None else test.labels.cpu()
        return torch.nonzero((own > 0) & (tested.bincount(minlength=self.classes) == 0)).flatten().tolist()

    def _plain(self, order: Tensor, size: int) -> Iterator[Batch]:
        images, finish = self._prepared(self.train)
        for rows in torch.split(order.to(images.device), size):
            yield finish(self._taken(images, rows)), self._taken(self.train.labels, rows)

    def _augmented(self, order: Tensor, size: int, transform: Augmentation, moves: Tensor) -> Iterator[Batch]:
        images = self.train.images
        finish = normaliser(self.input, images.dtype, self.device)
        for rows, by in zip(
            torch.split(order.to(images.device), size), torch.split(moves.to(self.device), size), strict=True
        ):
            yield finish(transform.move(self._taken(images, rows), by)), self._taken(self.train.labels, rows)

    def _prepared(self, examples: Examples) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Images to take batches from, and the function that finishes a batch there: the identity where memory allows.

        In the host's memory they stay as they are: bytes take a quarter of the way to a GPU.
        """
        if examples.kept_bytes and examples.images.device.type == self.device.type:
            return examples.normalised(self.input), lambda images: images
        return examples.images, normaliser(self.input, examples.images.dtype, self.device)

    def _taken(self, values: Tensor, rows: Tensor) -> Tensor:
        """The rows [B] of a tensor [N, ...], on the site's device."""
        if values.device.type == self.device.type:
            return values.index_select(0, rows)
        staged = page_locked((len(rows), *values.shape[1:]), values.dtype)
        return torch.index_select(values, 0, rows, out=staged).to(self.device, non_blocking=True)

    def _moved(self, values: Tensor) -> Tensor:
        """A tensor [...] on the site's device."""
        if values.device.type == self.device.type:
            return values
        return page_locked(values.shape, values.dtype).copy_(values).to(self.device, non_blocking=True)


def class_balanced(labels: Tensor, order: Tensor, rng: torch.Generator) -> Tensor:
    """As many draws of examples as there are, [N] int64: each class as often, but for one draw more of some of them.

    An example is drawn from those of its class, with replacement.

    Args:
        labels: [N] int64 on the CPU.
        order: a random permutation of the N numbers: of it the classes come in random order.
        rng: of the CPU.
    """
    by_class = labels.argsort(stable=True)  # the examples of the first class, then those of the next, …
    counts = labels.bincount()
    counts = counts[counts > 0]  # [P] of the classes that there are
    first_of_more = torch.randint(len(counts), (), generator=rng)  # by chance, or low classes would be drawn more
    drawn = (order + first_of_more) % len(counts)  # [N] which class
    # In float64 a number below 1 times a count stays below the count.
    within = (torch.rand(len(order), generator=rng, dtype=torch.float64) * counts[drawn]).long()
    return by_class[(counts.cumsum(0) - counts)[drawn] + within]


def fits(size: int, device: torch.device) -> bool:
    """Whether `size` bytes are at most a quarter of a GPU's free memory; the rest is left for the model."""
    free, _ = torch.cuda.mem_get_info(device)
    return size <= free / 4


def check_labels(examples: Examples, classes: int) -> None:
    """Check that labels are in 0..classes - 1.

    Raises:
        DataError: naming what they are.
    """
    labels = examples.labels
    low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    if low < 0 or high >= classes:
        raise DataError(f"labels are {low} to {high}, but the run has {classes} classes; expected 0 to {classes - 1}")


# Samples that take its share of each class.


def stratified_sample(labels: Tensor, count: int, seed: int) -> Tensor:
    """Indices [count] int64, ascending, of examples drawn from each class by its share; one of each class at least.

    Equal labels, count and seed give equal indices, so that sites with one test set are scored on the same images. All
    indices, if there are not more; as many as there are classes, if `count` is less.

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
