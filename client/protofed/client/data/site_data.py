"""A site's examples as methods use them: normalised batches on its device, in the same order on every device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from protofed.client.data.augmentation import Augmentation, build_augmentation, move_images, moved_dtype, normaliser
from protofed.client.data.examples import (
    Examples,
    check_labels,
    check_shape,
    no_examples,
    select,
    stratified_share,
    total_bytes,
)
from protofed.client.device import page_locked
from protofed.client.task import ClientTask
from protofed.client.tasks.classification import CLASSES
from protofed.common.config.recipe import AugmentationSetting, Sampling
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

Batch: TypeAlias = tuple[Tensor, Tensor]  # [B, channels, H, W] normalised float32, targets [B, ...], on its device

CPU = torch.device("cpu")
READERS = 2  # threads that read batches ahead
AHEAD = 4  # batches that they read ahead


@dataclass(frozen=True, eq=False)
class SiteData:
    """One site's data.

    Attributes:
        train: what the site trains on; never empty, unless it only scores.
        test: the common test set, for all sites' models; empty only if there is a `local_test` and no common one, or
            none could be held out of a site's own images in a run with noise.
        input: shape and normalisation of the run's images.
        classes: C of the run, over all sites; of another task, the model's outputs.
        task: what the labels are targets of.
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
    task: ClientTask = CLASSES

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
            check_labels(examples, self.task, self.classes)

    @classmethod
    def for_scoring(
        cls,
        test: Examples,
        input_: Input,
        classes: int,
        auxiliary: Examples | None = None,
        task: ClientTask = CLASSES,
    ) -> SiteData:
        """The data of an evaluator: a test set, and what it may refine models on."""
        none = no_examples(input_, test.labels)
        return cls(none, test, input_, classes, scores_only=True, auxiliary=auxiliary, task=task)

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
        return SiteData(self.auxiliary, self.auxiliary, self.input, self.classes, self.device, task=self.task)

    def placed(self, device: torch.device) -> SiteData:
        """The same data for training on `device`: moved there if it fits, else batch by batch from where it is.

        Sites that share a test set share it there, too.
        """
        sets = [
            examples for examples in (self.train, self.test, self.local_test, self.auxiliary) if examples is not None
        ]
        if device.type == "cuda" and not fits(total_bytes(sets, device), device):
            return replace(self, device=device)
        return replace(self._each(lambda examples: examples.on(device)), device=device)

    def compact(self) -> SiteData:
        """The same data without other sites' images in memory."""
        return self._each(Examples.compact)

    def _each(self, change: Callable[[Examples], Examples]) -> SiteData:
        """These data with each of the sets changed."""
        local, auxiliary = (None if each is None else change(each) for each in (self.local_test, self.auxiliary))
        return replace(self, train=change(self.train), test=change(self.test), local_test=local, auxiliary=auxiliary)

    def held_out(self, fraction: float) -> tuple[SiteData, Examples]:
        """These data without a part of the training examples, and that part, for a method to compare models on.

        Always the same part, as long as the site's examples are: a model that is judged by it was never trained on it.
        Each class gives this share of its examples, rounded down; so the part may be empty.
        """

        def drawn() -> tuple[Examples, Examples]:
            mask = stratified_share(self.task.strata(self.train.labels.cpu()), fraction)
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
        raw = augmentation != "none" and moves is not None
        images, labels = self._batch(self.train, rows, raw=raw)
        if not raw or moves is None:
            return self._finisher(self.train)(images), labels
        images = move_images(build_augmentation(augmentation), images, moves.to(self.device))
        return normaliser(self.input, images.dtype, self.device)(images), labels

    def ordered(self, examples: Examples, size: int) -> Iterator[Batch]:
        """One pass over `examples` of this site in their order, without augmentation: for scores and class means."""
        finish = self._finisher(examples)
        if examples.rows is None and self._at_hand(examples):  # no copy
            images_of_all = torch.split(self._array(examples), size)
            pieces: Iterable[Batch] = zip(images_of_all, torch.split(examples.labels, size), strict=True)
        else:
            pieces = self._loaded(examples, torch.split(torch.arange(len(examples)), size))
        for images, labels in pieces:
            if len(labels):
                yield finish(images), labels

    @property
    def scoring_batch(self) -> int:
        """How many images scores and class means take at a time.

        The activations of 128 images of a CNN need a quarter of the memory of 512, and a CPU is as fast.
        """
        most, nbytes = (128, 64 << 20) if self.device.type == "cpu" else (512, 512 << 20)
        return max(1, min(most, nbytes // (4 * prod(self.input.shape))))

    def computed(
        self,
        function: Callable[[Tensor, Tensor], Tensor],
        examples: Examples,
        check: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """What `function` makes of all images, [N, ...], in one pass as of `ordered`.

        It is one array from the start: small arrays between the large ones of each batch would keep what these leave
        free from being used again.

        Args:
            function: images [B, channels, H, W] and labels [B] -> values [B, ...], of each image alone.
            examples: of this site, at least one.
            check: called before each batch; what it raises ends the pass.
        """
        values, begin = torch.empty(0), 0
        for images, labels in self.ordered(examples, self.scoring_batch):
            check()
            part = function(images, labels)
            if not begin:
                values = part.new_empty(len(examples), *part.shape[1:])
            values[begin : begin + len(part)] = part
            begin += len(part)
        return values

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
        counts = partial(self.task.counts, classes=self.classes)
        own = torch.ones(self.classes) if self.scores_only else counts(self.train.labels.cpu())
        tested = torch.zeros(self.classes) if test is None else counts(test.labels.cpu())
        return torch.nonzero((own > 0) & (tested == 0)).flatten().tolist()

    def _plain(self, order: Tensor, size: int) -> Iterator[Batch]:
        finish = self._finisher(self.train)
        for images, labels in self._loaded(self.train, torch.split(order, size)):
            yield finish(images), labels

    def _augmented(self, order: Tensor, size: int, augmentation: Augmentation, moves: Tensor) -> Iterator[Batch]:
        loaded = self._loaded(self.train, torch.split(order, size), raw=True)
        finish = normaliser(self.input, moved_dtype(augmentation, self.train.images.dtype), self.device)
        for (images, labels), by in zip(loaded, torch.split(moves.to(self.device), size), strict=True):
            yield finish(move_images(augmentation, images, by)), labels

    def _is_normalised(self, examples: Examples) -> bool:
        """Whether batches are taken from a normalised copy: where memory allows, and not from the host's to a GPU.

        Bytes take a quarter of that way.
        """
        return bool(examples.kept_bytes) and examples.images.device.type == self.device.type

    def _array(self, examples: Examples) -> Tensor:
        """The images [M, channels, H, W] that batches are taken from."""
        return examples.normalised_array(self.input) if self._is_normalised(examples) else examples.images

    def _finisher(self, examples: Examples) -> Callable[[Tensor], Tensor]:
        """The function that makes of a batch of `_array` what a model takes: the identity, if that is normalised."""
        if self._is_normalised(examples):
            return lambda images: images
        return normaliser(self.input, examples.images.dtype, self.device)

    def _loaded(self, examples: Examples, parts: Iterable[Tensor], *, raw: bool = False) -> Iterator[Batch]:
        """The images and labels of each part, [B] int64 indices of examples on the CPU, on the site's device.

        Threads read ahead what comes from a disk or goes to a GPU; what they read is in the same order.

        Args:
            raw: the images as they are stored, not those of `_array`.
        """
        read = partial(self._batch, examples, raw=raw)
        yield from map(read, parts) if self._at_hand(examples) else read_ahead(read, parts)

    def _batch(self, examples: Examples, part: Tensor, *, raw: bool) -> Batch:
        """The images and labels of a part, [B] int64 on the CPU, on the site's device."""
        rows = examples.rows_at(part)
        if self._at_hand(examples):
            return select(examples.images if raw else self._array(examples), rows), select(examples.labels, part)
        images = examples.read(rows, page_locked((len(rows), *examples.images.shape[1:]), examples.images.dtype))
        labels = select(
            examples.labels, part, page_locked((len(part), *examples.labels.shape[1:]), examples.labels.dtype)
        )
        return self._moved(images), self._moved(labels)

    def _at_hand(self, examples: Examples) -> bool:
        """Whether the images are in the memory of the site's device."""
        return examples.source is None and examples.images.device.type == self.device.type

    def _moved(self, values: Tensor) -> Tensor:
        """Values [...] in page-locked memory, on the site's device."""
        return values.to(self.device, non_blocking=True)


def read_ahead(read: Callable[[Tensor], Batch], parts: Iterable[Tensor]) -> Iterator[Batch]:
    """What `read` makes of each part, in their order; `READERS` threads are up to `AHEAD` parts ahead."""
    with ThreadPoolExecutor(READERS, thread_name_prefix="read-ahead") as pool:
        waiting = deque[Future[Batch]]()
        try:
            for part in parts:
                waiting.append(pool.submit(read, part))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


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
