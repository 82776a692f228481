"""From `[data]` to sites: load the source, give it its long tail, cut it; equal settings give equal sites."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

import numpy as np
import torch

from protofed.client.data import partition
from protofed.client.data.examples import Examples, SiteData
from protofed.client.data.partition import Indices, Labels
from protofed.client.data.sources import Column, Source, load
from protofed.common import recipe
from protofed.common.errors import DataError
from protofed.common.recipe import Data, Input

_LONG_TAIL = 1  # beside data.seed, so that the tail and the partition draw from streams of their own


def load_sites(data: Data, input_: Input, classes: int) -> list[SiteData]:
    """All sites of a simulation, on the CPU. They share one test set, but for a test_site column (see `Column`).

    Raises:
        DataError: the source cannot be used, or cannot be cut as `data.partition` says.
    """
    source, whole = _long_tailed(data, input_, classes)
    return [_site(source, whole, data, indices) for indices in _cut(source, data)]


def load_site(data: Data, share: int, input_: Input, classes: int) -> SiteData:
    """A daemon's own: the `share`-th of `load_sites`, counted from 0.

    Raises:
        DataError: as `load_sites`, or there is no such share.
    """
    source, whole = _long_tailed(data, input_, classes)
    cut = _cut(source, data)
    if not 0 <= share < len(cut):
        raise DataError(f"share {share} of {len(cut)}: expected 0 to {len(cut) - 1}")
    return _site(source, whole, data, cut[share])


def load_test(data: Data, input_: Input, classes: int) -> SiteData:
    """An evaluator's: the source's whole test set, and nothing to train on.

    Raises:
        DataError: the source cannot be used.
    """
    return SiteData.for_scoring(load(data, input_).test, input_, classes)


def _long_tailed(data: Data, input_: Input, classes: int) -> tuple[Source, SiteData]:
    """The source after its long tail, and the same as if it were one site: that checks all of it before it is cut."""
    source = load(data, input_)
    whole = SiteData(source.train, source.test, input_, classes)
    if data.long_tail is None:
        return source, whole
    rng = np.random.RandomState([data.seed, _LONG_TAIL])
    kept = partition.long_tail(_labels(source.train), data.long_tail, rng)
    column = None if source.site_column is None else source.site_column[kept]
    train = _rows(source.train, kept)
    return replace(source, train=train, site_column=column), replace(whole, train=train)


def _cut(source: Source, data: Data) -> list[Indices]:
    """Each site's training examples."""
    labels = _labels(source.train)
    rng = np.random.RandomState(data.seed)
    match data.partition:
        case recipe.Whole():
            return [np.arange(len(labels))]
        case recipe.Dirichlet(sites=sites, beta=beta, min_examples=examples, min_classes=classes):
            return partition.dirichlet(labels, sites, beta, rng, examples, classes)
        case recipe.Shards(sites=sites, shards=shards):
            return partition.shards(labels, sites, shards, rng)
        case recipe.Column():
            return partition.by_column(_column(source))
        case other:
            assert_never(other)


def _column(source: Source) -> Column:
    if source.site_column is None:
        raise DataError("partition 'column' needs a source with a site column; add train_site to the .npz")
    return source.site_column


def _site(source: Source, whole: SiteData, data: Data, indices: Indices) -> SiteData:
    test = whole.test
    if isinstance(data.partition, recipe.Column) and source.test_site_column is not None:
        value = _column(source)[indices[0]]
        rows = np.flatnonzero(source.test_site_column == value)
        if not len(rows):
            raise DataError(f"site {value} of train_site has no example in test_site; expected at least one")
        test = _rows(test, rows)
    train = whole.train if len(indices) == len(whole.train) else _rows(whole.train, indices)
    return replace(whole, train=train, test=test)


def _labels(examples: Examples) -> Labels:
    return examples.labels.numpy()


def _rows(examples: Examples, indices: Indices) -> Examples:
    return examples.take(torch.from_numpy(indices))
