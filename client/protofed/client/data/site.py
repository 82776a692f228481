"""From `[data]` to sites: load the source, give it its long tail, partition it. Equal settings give equal sites.

Auxiliary images: public ones with labels that an evaluator refines models on (FEDIC), as many of each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

import numpy as np
import torch

from protofed.client.data import partition
from protofed.client.data.examples import Examples, check_labels
from protofed.client.data.hold_out import check_apart, held_out, hold_out_each, no_test_set
from protofed.client.data.partition import Indices, Labels
from protofed.client.data.reading import Reading
from protofed.client.data.site_data import SiteData
from protofed.client.data.sources import LABELLED_BY_NAME, Column, Source, load
from protofed.client.task import ClientTask
from protofed.client.tasks.classification import CLASSES, ClassificationTask
from protofed.common.config import data as kinds
from protofed.common.config.data import SOURCES, Data
from protofed.common.config.tables import Input
from protofed.common.errors import DataError
from protofed.common.plugins import PluginKind, error_line
from protofed.common.plugins import load as load_plugin

_OWN = frozenset({"npz", "folder", "manifest", "dicomweb"})  # sources of a site's own images, as those of plug-ins
_READING = Reading()
_LONG_TAIL_STREAM = 1  # seeds the tail together with data.seed: its draws must not move those of the partition


def load_sites(
    data: Data,
    input_: Input,
    classes: int,
    class_names: Sequence[str] = (),
    reading: Reading = _READING,
    *,
    noisy: bool = False,
    task: ClientTask = CLASSES,
) -> list[SiteData]:
    """All sites of a simulation, on the CPU; they are views of one source, and share its test set.

    The test set is empty as of `split.draw_test_rows`. Each also has a `local_test` with `data.local_test_fraction`
    (unless it can spare none), or with `data.local_test`. If the sites are cut by a column and the source has a
    test_site column, it is the site's own rows of the test set.

    Args:
        data: where the images come from, and how they are partitioned.
        input_: the shape and values that the model takes.
        classes: C.
        class_names: the run's class names; files need them, empty if the run has none.
        reading: of image files.
        noisy: the run has `[plan.dp]`: as of `sources.load`.
        task: what the labels are targets of.

    Raises:
        DataError: the source cannot be used, or not partitioned as `data` says.
    """
    source = load(data, input_, class_names, reading, noisy=noisy, task=task, classes=classes)
    return _sites(source, data, input_, classes, task)


def load_simulation(
    data: Data,
    input_: Input,
    classes: int,
    class_names: Sequence[str] = (),
    reading: Reading = _READING,
    *,
    noisy: bool = False,
    task: ClientTask = CLASSES,
) -> tuple[list[SiteData], SiteData]:
    """`load_sites` and `load_test` of one source, which is loaded once."""
    source = load(data, input_, class_names, reading, noisy=noisy, task=task, classes=classes)
    return _sites(source, data, input_, classes, task), _test(source, data, input_, classes, task)


def load_site(
    data: Data,
    index: int,
    input_: Input,
    classes: int,
    class_names: Sequence[str] = (),
    reading: Reading = _READING,
    *,
    noisy: bool = False,
    task: ClientTask = CLASSES,
) -> SiteData:
    """The data of one site's daemon: the `index`-th of `load_sites`, from 0; a whole source if it is not partitioned.

    Raises:
        DataError: as `load_sites`, there is no such site, or `data` have noise bound what it cannot.
    """
    if noisy:
        _check_by_unit(data)
    source = load(data, input_, class_names, reading, noisy=noisy, task=task, classes=classes)
    source, auxiliary = _for_sites(source, data, classes, task)
    cut = _cut(source, data, task)
    if isinstance(data.partition, kinds.Whole):
        index = 0
    if not 0 <= index < len(cut.train):
        raise DataError(f"partition_index {index} of {len(cut.train)}: expected 0 to {len(cut.train) - 1}")
    return replace(_site(source, cut, index, input_, classes, task), auxiliary=auxiliary).compact()


def load_test(
    data: Data,
    input_: Input,
    classes: int,
    class_names: Sequence[str] = (),
    reading: Reading = _READING,
    *,
    noisy: bool = False,
    task: ClientTask = CLASSES,
) -> SiteData:
    """An evaluator's data, without training examples: a test set, and the auxiliary images, if there are some.

    The test set is the source's. If the source has none, it is all local test sets together.

    Raises:
        DataError: the source cannot be used; without a test set, as `load_sites`.
    """
    source = load(data, input_, class_names, reading, noisy=noisy, task=task, classes=classes)
    return _test(source, data, input_, classes, task).compact()


def _sites(source: Source, data: Data, input_: Input, classes: int, task: ClientTask) -> list[SiteData]:
    source, _ = _for_sites(source, data, classes, task)
    cut = _cut(source, data, task)
    return [_site(source, cut, index, input_, classes, task) for index in range(len(cut.train))]


def _test(source: Source, data: Data, input_: Input, classes: int, task: ClientTask) -> SiteData:
    if len(source.test) or data.local_test_fraction is None:
        _, auxiliary = _set_apart(source, data, classes)
        return SiteData.for_scoring(source.test, input_, classes, auxiliary, task)
    source, auxiliary = _for_sites(source, data, classes, task)
    cut = _cut(source, data, task)
    return SiteData.for_scoring(_rows(cut.pool, np.concatenate(cut.local)), input_, classes, auxiliary, task)


def _check_by_unit(data: Data) -> None:
    """Refuse settings that choose a site's images by counts of all of them: one more would move others.

    Public sets are the same everywhere: nobody's image is one more of them.
    """
    if data.source not in _OWN and data.source in SOURCES:
        return
    if isinstance(data.partition, kinds.ColumnPartition) and data.source in LABELLED_BY_NAME:
        raise DataError(
            "partition 'column' finds sites by their images, and the run has [plan.dp], whose noise hides single "
            "patients. Remove data.partition, and set data.root to this site's own folder or manifest"
        )
    divided = not isinstance(data.partition, kinds.Whole | kinds.ColumnPartition)
    choices = {"partition": divided, "long_tail": data.long_tail, "auxiliary_per_class": data.auxiliary_per_class}
    for key, chosen in choices.items():
        if chosen:
            raise DataError(
                f"data.{key} chooses this site's images by counts of all its images, and the run has [plan.dp], "
                "whose noise hides single patients. Remove the key from the settings, or take part in runs without "
                "noise"
            )


@dataclass(frozen=True, eq=False)
class _Cut:
    """A source partitioned into sites.

    Attributes:
        train: each site's indices into the source's training examples.
        pool: the examples that local test sets are taken from: the source's test set, or its training examples.
        local: each site's indices into the pool, none for a site that can spare no local test set; empty list: no site
            has one.
    """

    train: list[Indices]
    pool: Examples
    local: list[Indices]


def _for_sites(source: Source, data: Data, classes: int, task: ClientTask) -> tuple[Source, Examples | None]:
    """What is partitioned: the source with its long tail; and the auxiliary images, which it is without.

    Labels are checked here, once for all sites.
    """
    if not len(source.train):
        raise DataError("there are no training examples; expected at least one")
    if source.units is not None:
        source = _within(source, classes, task)
    for examples in (source.train, source.test):
        check_labels(examples, task, classes)
    if not isinstance(task, ClassificationTask) and (data.long_tail or data.auxiliary_per_class):
        key = "long_tail" if data.long_tail else "auxiliary_per_class"
        raise DataError(f"data.{key} chooses images by their class, and the run's task is no classification; remove it")
    source, auxiliary = _set_apart(source, data, classes)
    if data.long_tail is None:
        return source, auxiliary
    rng = np.random.RandomState([data.seed, _LONG_TAIL_STREAM])
    return _trained_on(source, partition.long_tail(_labels(source.train), data.long_tail, rng)), auxiliary


def _within(source: Source, classes: int, task: ClientTask) -> Source:
    """The source without examples whose labels are no targets of the run: with noise none may have it refused."""
    train, test = (
        np.flatnonzero(task.valid(examples.labels, classes).numpy()) for examples in (source.train, source.test)
    )
    column = source.test_site_column
    narrowed = replace(source, test=_rows(source.test, test), test_site_column=None if column is None else column[test])
    return _trained_on(narrowed, train)


def _set_apart(source: Source, data: Data, classes: int) -> tuple[Source, Examples | None]:
    """The source without its auxiliary images, and these; before the long tail, so that they are balanced."""
    if data.auxiliary_per_class is None:
        return source, None
    drawn = draw_auxiliary(source.train, source.test, data.auxiliary_per_class, classes, data.seed)
    remaining = np.setdiff1d(np.arange(len(source.train)), drawn)
    return _trained_on(source, remaining), _rows(source.train, drawn)


def _trained_on(source: Source, rows: Indices) -> Source:
    columns = (source.site_column, source.group_column, source.units)
    site, group, units = (None if column is None else column[rows] for column in columns)
    return replace(source, train=_rows(source.train, rows), site_column=site, group_column=group, units=units)


def _cut(source: Source, data: Data, task: ClientTask) -> _Cut:
    rng, labels = np.random.RandomState(data.seed), _strata(source.train, task)
    sites = _partition(source, labels, data.partition, rng)
    if source.group_column is not None:
        _check_groups(source, sites, data.partition)
    if data.local_test_fraction is not None:
        train, local = _held_out(source, labels, sites, data, data.local_test_fraction, rng)
        return _Cut(train, source.train, local)
    if data.local_test is not None:
        both = task.strata(torch.cat((source.train.labels, source.test.labels))).numpy()
        local = partition.by_class(both[: len(labels)], sites, both[len(labels) :], rng)
        return _Cut(sites, source.test, local)
    if isinstance(data.partition, kinds.ColumnPartition) and source.test_site_column is not None:
        # A test set that was held out by class may have nothing of a small site.
        may_lack = source.units is not None or source.drawn
        own = _own_rows(_column(source), source.test_site_column, may_lack=may_lack)
        return _Cut(sites, source.test, own)
    return _Cut(sites, source.test, [])


def _check_groups(source: Source, sites: list[Indices], how: kinds.Partition) -> None:
    """Check that no group is at two sites: what one site trains on could be in another's test set.

    With noise a group has the same side at both.
    """
    if not isinstance(how, kinds.Whole | kinds.ColumnPartition):
        raise DataError(
            f"partition '{how.kind}' would divide groups, such as a patient's images, among sites. Take 'whole', or "
            "'column' with each group at one site, or data without groups"
        )
    if source.group_column is not None and source.units is None:
        check_apart(source.group_column, sites, "the sites")


def _held_out(
    source: Source, labels: Labels, sites: list[Indices], data: Data, fraction: float, rng: np.random.RandomState
) -> tuple[list[Indices], list[Indices]]:
    """Sites that share out one source hold out as the released codes do, sites with images of their own by class.

    With noise each unit is held out by itself, at all of them.
    """
    if source.units is not None:
        out = held_out(source.units, fraction, data.seed, "local test")
        return [np.sort(site[~out[site]]) for site in sites], [np.sort(site[out[site]]) for site in sites]
    if isinstance(data.partition, kinds.Whole | kinds.ColumnPartition):
        return hold_out_each(labels, source.group_column, sites, fraction, rng)
    return partition.hold_out(sites, fraction, rng)


def _partition(source: Source, labels: Labels, how: kinds.Partition, rng: np.random.RandomState) -> list[Indices]:
    """Each site's indices into the source's training examples, by their strata [N]."""
    match how:
        case kinds.Whole():
            return [np.arange(len(labels))]
        case kinds.Dirichlet(sites=sites, beta=beta, min_examples=examples, min_classes=classes):
            return partition.dirichlet(labels, sites, beta, rng, examples, classes)
        case kinds.PfllibDirichlet(sites=sites, beta=beta, min_examples=examples):
            return partition.pfllib_dirichlet(labels, sites, beta, rng, examples)
        case kinds.NiidBenchDirichlet(sites=sites, beta=beta, min_examples=examples):
            return partition.niid_bench_dirichlet(labels, sites, beta, rng, examples)
        case kinds.CreffDirichlet(sites=sites, beta=beta):
            return partition.creff_dirichlet(labels, sites, beta, rng)
        case kinds.Pathological(sites=sites, classes_each=each, balanced=balanced):
            return partition.pathological(labels, sites, each, balanced, rng)
        case kinds.Shards(sites=sites, shards=shards):
            return partition.shards(labels, sites, shards, rng)
        case kinds.ColumnPartition():
            return partition.by_column(_column(source))
        case kinds.PluginPartition(kind=kind, options=options):
            return _by_plugin(kind, options, labels, rng)
        case other:
            assert_never(other)


def _by_plugin(kind: str, options: dict[str, Any], labels: Labels, rng: np.random.RandomState) -> list[Indices]:
    cut = load_plugin(PluginKind.PARTITION, kind, kinds.KINDS)
    try:
        sites = [np.sort(np.asarray(site, dtype=np.int64)) for site in cut(labels, rng, **options)]
        dealt = np.concatenate(sites)
    except Exception as error:  # a plug-in may raise anything
        raise DataError(f"partition '{kind}' failed: {error_line(error)}; expected each site's indices") from error
    if len(np.unique(dealt)) < len(dealt) or not np.isin(dealt, np.arange(len(labels))).all():
        raise DataError(f"partition '{kind}' gave an index twice, or one outside 0 to {len(labels) - 1}")
    return sites


def _column(source: Source) -> Column:
    if source.site_column is None:
        raise DataError(
            "partition 'column' needs a source that names the sites. Expected an .npz with train_site (with "
            "data.merge_test_into_train, test_site, too), a manifest with a column site, or folders SITE/CLASS"
        )
    return source.site_column


def _own_rows(column: Column, test_column: Column, *, may_lack: bool) -> list[Indices]:
    """Each site's indices into the test set, by its site column."""
    sites = np.unique(column)
    rows = [np.flatnonzero(test_column == site) for site in sites]
    for site, own in zip(sites, rows, strict=True):
        if not len(own) and not may_lack:
            raise DataError(f"site {site} trains, and has no examples in the test set; expected at least one")
    return rows


def _site(source: Source, cut: _Cut, index: int, input_: Input, classes: int, task: ClientTask) -> SiteData:
    train = _rows(source.train, cut.train[index])
    if source.group_column is not None:
        _, units = np.unique(source.group_column[np.sort(cut.train[index])], return_inverse=True)
        train = replace(train, units=torch.from_numpy(units.astype(np.int64)))
    local = _rows(cut.pool, cut.local[index]) if cut.local and len(cut.local[index]) else None
    noisy = source.units is not None
    if local is None and not len(source.test) and not noisy:
        raise no_test_set()
    own_test = noisy and (source.drawn or not len(source.test))
    return SiteData(train, source.test, input_, classes, local_test=local, own_test=own_test, task=task)


def _labels(examples: Examples) -> Labels:
    return examples.labels.numpy()


def _strata(examples: Examples, task: ClientTask) -> Labels:
    return task.strata(examples.labels).numpy()


def _rows(examples: Examples, rows: Indices) -> Examples:
    """A view of the examples of these indices, in the source's order."""
    return examples if len(rows) == len(examples) else examples.take(torch.from_numpy(np.sort(rows)))


_STREAM = 3  # seeds them together with data.seed: their draw must not move others


def draw_auxiliary(train: Examples, test: Examples, each: int, classes: int, seed: int) -> Indices:
    """Indices into the training examples of `each` of every class, sorted; none of them is an image of the test set.

    A score on images that a model was refined on would say nothing, so images are compared, and not only sets.

    Args:
        test: what models are scored on; may be empty.
        classes: C.

    Raises:
        DataError: a class has fewer.
    """
    scored = set(test.digests()) if len(test) else set()
    free = np.array([image not in scored for image in train.digests()] if scored else [True] * len(train), bool)
    labels, rng = train.labels.numpy(), np.random.default_rng([seed, _STREAM])
    drawn: list[Indices] = []
    for c in range(classes):
        rows = np.flatnonzero((labels == c) & free)
        if len(rows) < each:
            raise DataError(
                f"data.auxiliary_per_class = {each}: class {c} has fewer training images outside the test set. No "
                "image serves both to refine models and to score them. Add images of this class, or lower the key"
            )
        drawn.append(rng.choice(rows, each, replace=False))
    return np.sort(np.concatenate(drawn))
