"""Training or test examples with what their source says of each, and how a test set is held out of one half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.client.data import groups
from protofed.client.data.labels import by_number
from protofed.client.data.partition import Indices, Labels
from protofed.client.data.site_data import Examples
from protofed.common.config.recipe import Data
from protofed.common.errors import DataError

Column: TypeAlias = NDArray[Any]  # [N], one value an example

TEST_SHARE = 0.3  # of a source without a test set, unless data.test_fraction says otherwise


@dataclass(frozen=True, eq=False)
class DataSplit:
    """One half of a source.

    Attributes:
        site: which site each comes from, where the source says so.
        group: which examples stay together, where it says so.
    """

    examples: Examples
    site: Column | None = None
    group: Column | None = None

    def take(self, rows: Indices) -> DataSplit:
        """These rows, in this order."""
        site, group = (None if column is None else column[rows] for column in (self.site, self.group))
        return DataSplit(self.examples.take(torch.from_numpy(rows)), site, group)

    def relabelled(self, data: Data, class_names: Sequence[str]) -> DataSplit:
        """With the run's classes in place of the source's numbers, and without what is ignored.

        Raises:
            DataError: numbers that mean nothing in the run.
        """
        if not data.label_map and not data.ignore_labels:
            return self
        rows, classes = by_number(self.examples.labels.numpy(), data, class_names)
        kept = self.take(rows)
        return DataSplit(Examples(kept.examples.images, torch.from_numpy(classes)), kept.site, kept.group)


def held_out(labels: Labels, group: Column | None, data: Data) -> tuple[Indices, Indices]:
    """Rows of the training and the test set of a source that has no test set, drawn by data.seed.

    Without groups, as many test examples of every class: the share of what the rarest class has. With groups, the
    share of every class, as near as whole groups come to it. With `data.merge_test_into_train` the test set is empty:
    what is held out would only come back.

    Raises:
        DataError: that is less than one example.
    """
    if data.merge_test_into_train:
        return np.arange(len(labels)), np.empty(0, np.int64)
    share, rng = TEST_SHARE if data.test_fraction is None else data.test_fraction, np.random.default_rng(data.seed)
    if group is not None:
        return groups.hold_out(labels, group, share, rng)
    present, sizes = np.unique(labels, return_counts=True)
    fewest = sizes.min(initial=len(labels))
    if not (each := int(share * fewest)):
        raise DataError(
            f"holding out {share:g} of the rarest class's {fewest} examples leaves no test set; add test_images and "
            "test_labels (of files: folders train and test, or a column split), or raise data.test_fraction"
        )
    drawn = [rng.choice(np.flatnonzero(labels == c), each, replace=False) for c in present]
    out = np.zeros(len(labels), dtype=bool)
    out[np.concatenate(drawn)] = True
    return np.flatnonzero(~out), np.flatnonzero(out)


def refuse_test_share(data: Data) -> None:
    """Of a source that has a test set.

    Raises:
        DataError: `data.test_fraction` is set.
    """
    if data.test_fraction is not None:
        raise DataError(f"source {data.source} has a test set of its own; remove data.test_fraction")
