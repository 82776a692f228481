"""A split (training or test examples with their sites and groups), and the drawing of test and validation sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.client.data.examples import Examples
from protofed.client.data.hold_out import Units, held_out, hold_out, no_test_set, units_of_digests, units_of_groups
from protofed.client.data.labels import by_number
from protofed.client.data.partition import Indices, Labels
from protofed.client.task import ClientTask
from protofed.common.config.data import Data
from protofed.common.errors import DataError

Column: TypeAlias = NDArray[Any]  # [N], one value an example

DEFAULT_TEST_FRACTION = 0.3  # of a source without a test set, if data.test_fraction is not set
_VALIDATION_STREAM = 2  # seeds the validation set together with data.seed: it must not move other draws
BALANCED = frozenset({"digits", "spiral"})  # public sets: their shipped runs were scored on balanced test sets


@dataclass(frozen=True, eq=False)
class DataSplit:
    """The training or the test examples of a source.

    Attributes:
        site: the site of each example; None: the source does not say.
        group: the group of each example, such as a patient, whose examples stay together; None: there are none.
        units: what the side of each example follows from, in a run with noise; None: the run has none.
        drawn: these examples were held out of those that the site trains on.
    """

    examples: Examples
    site: Column | None = None
    group: Column | None = None
    units: Units | None = None
    drawn: bool = False

    def take(self, rows: Indices) -> DataSplit:
        """The examples of these indices [n], in this order."""
        columns = (self.site, self.group, self.units)
        site, group, units = (None if column is None else column[rows] for column in columns)
        return DataSplit(self.examples.take(torch.from_numpy(rows)), site, group, units, self.drawn)

    def relabelled(
        self, task: ClientTask, classes: int, data: Data, class_names: Sequence[str], *, noisy: bool = False
    ) -> DataSplit:
        """The split with the task's targets in place of the source's numbers, without the labels that are ignored.

        Args:
            classes: C.
            noisy: as of `sources.load`.

        Raises:
            DataError: as `labels.by_number`.
        """
        rows, targets = by_number(self.examples.labels.numpy(), task, data, class_names, classes, noisy=noisy)
        usable = self.take(rows) if len(rows) < len(self.examples) else self
        return replace(usable, examples=replace(usable.examples, labels=targets))

    def with_units(self) -> DataSplit:
        """The split with its units: its groups or, where it has none, its images."""
        units = units_of_digests(self.examples.digests()) if self.group is None else units_of_groups(self.group)
        return replace(self, units=units)


def draw_test_rows(
    labels: Labels, group: Column | None, data: Data, units: Units | None = None
) -> tuple[Indices, Indices]:
    """Draw a test set, by data.seed, from a source that has none.

    A public source of `BALANCED` gives its published test set. A site's own images are held out by `hold_out`. In a run
    with noise each unit's own hash decides. The set is empty with `data.merge_test_into_train`, as it would only be
    merged back. It is also empty where a site's own images have `data.local_test_fraction` alone: two test sets would
    take half of the training images.

    Args:
        labels: [N]: the task's strata.
        group: [N]; None: no groups.
        units: as of `DataSplit`.

    Returns:
        Indices of the training and of the test examples, sorted.

    Raises:
        DataError: the test set would be empty; never with units.
    """
    own_alone = data.local_test_fraction is not None and data.test_fraction is None and data.source not in BALANCED
    if data.merge_test_into_train or own_alone:
        return np.arange(len(labels)), np.empty(0, np.int64)
    fraction = DEFAULT_TEST_FRACTION if data.test_fraction is None else data.test_fraction
    rng = np.random.default_rng(data.seed)
    if data.source in BALANCED:
        return _balanced(labels, fraction, rng, "test_fraction")
    if units is not None:
        return sides(units, fraction, data, "test")
    train, test = hold_out(labels, group, fraction, rng)
    if not len(test):
        raise no_test_set()
    return train, test


def draw_validation(train: DataSplit, fraction: float, data: Data, task: ClientTask) -> tuple[DataSplit, DataSplit]:
    """Divide training examples, by data.seed, into what is trained on and this fraction of each class, to tune by.

    A public source of `BALANCED` gives as many of every class as its test set has. Otherwise `hold_out` draws. In a run
    with noise each unit's own hash decides.

    Raises:
        DataError: the validation set would be empty; never in a run with noise.
    """
    rng = np.random.default_rng([data.seed, _VALIDATION_STREAM])
    labels: Labels = task.strata(train.examples.labels).numpy()
    if data.source in BALANCED:
        remaining, drawn = _balanced(labels, fraction, rng, "validation_fraction")
    elif train.units is not None:
        remaining, drawn = sides(train.units, fraction, data, "validation")
    else:
        remaining, drawn = hold_out(labels, train.group, fraction, rng)
    if not len(drawn) and train.units is None:
        raise no_test_set()
    return train.take(remaining), replace(train.take(drawn), drawn=data.source not in BALANCED)


def sides(units: Units, fraction: float, data: Data, purpose: str) -> tuple[Indices, Indices]:
    """Indices of what stays and of what is held out, by `held_out`; either may be empty."""
    out = held_out(units, fraction, data.seed, purpose)
    return np.flatnonzero(~out), np.flatnonzero(out)


def _balanced(labels: Labels, fraction: float, rng: np.random.Generator, key: str) -> tuple[Indices, Indices]:
    """As many test examples of every class: the fraction of the rarest class's number."""
    present, sizes = np.unique(labels, return_counts=True)
    if not (each := int(fraction * sizes.min())):
        raise DataError(f"data.{key} = {fraction:g} leaves no test set; raise it, or leave it out")
    in_test = np.zeros(len(labels), dtype=bool)
    in_test[np.concatenate([rng.choice(np.flatnonzero(labels == c), each, replace=False) for c in present])] = True
    return np.flatnonzero(~in_test), np.flatnonzero(in_test)


def refuse_test_fraction(data: Data) -> None:
    """Refuse `data.test_fraction` for a source that has a test set of its own.

    Raises:
        DataError: it is set.
    """
    if data.test_fraction is not None:
        raise DataError(f"source {data.source} has a test set of its own; remove data.test_fraction")
