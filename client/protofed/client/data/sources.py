"""Load a source: files in folders or a manifest, images of a PACS, .npz, MedMNIST's and torchvision's sets, plug-ins.

Every failure is a DataError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from protofed.client.data import arrays, dicomweb, image_files
from protofed.client.data.decoding import open_image, silence_decoders
from protofed.client.data.examples import Examples, check_shape, join
from protofed.client.data.file_entry import TooManyUnreadableError, UnreadableImageError, normalise
from protofed.client.data.hold_out import Units, check_apart, units_of_contents, units_of_files, units_of_groups
from protofed.client.data.image_cache import ImageCache
from protofed.client.data.image_files import IndexedFile, Scan, as_picture, scan
from protofed.client.data.labels import as_targets
from protofed.client.data.partition import Indices
from protofed.client.data.pictures import FilePicture
from protofed.client.data.reading import ReadImages, Reading, image_cache_for, read_images
from protofed.client.data.split import BALANCED, DataSplit, draw_test_rows, draw_validation, refuse_test_fraction
from protofed.client.data.split import Column as Column
from protofed.client.task import ClientTask
from protofed.client.tasks.classification import CLASSES
from protofed.common.config.data import ColumnPartition, Data
from protofed.common.config.tables import MAX_IMAGE_VALUES, Input
from protofed.common.errors import DataError, short

MAX_SUBGROUPS = 50  # values of a column
MAX_REASONS = 5  # that one error lists; none names a file
_READING = Reading()
log = structlog.get_logger()


def read_files(
    data: Data,
    input_: Input,
    class_names: Sequence[str],
    reading: Reading,
    *,
    noisy: bool = False,
    task: ClientTask = CLASSES,
) -> tuple[DataSplit, DataSplit]:
    """Read a source labelled by names as training and test examples; files of the split val are left out.

    If the files have no split, the test set is drawn before any image is decoded. So a file that becomes unreadable
    moves no other file between the sets.

    Args:
        noisy, task: as of `sources.load`.

    Raises:
        DataError: as `scan` and, but for noise, `Scan.check`; or there are no images.
        TooManyUnreadableError: more cannot be read than `data.max_unreadable_fraction` allows.
    """
    files = scan(data, class_names, len(class_names), input_.frames, task)
    if files.left_out:
        log.info("deleted files, and files that are no images by their name, are left out", count=len(files.left_out))
    if not noisy:
        files.check()
    usable = files.usable() if noisy else files.items
    pictures = [as_picture(item) for item in usable]
    cache = image_cache_for(pictures, input_, reading)
    units = _units(usable, cache) if noisy else None
    train, test = _split_rows(usable, data, units, task)
    order = np.concatenate((train, test))
    items = [usable[row] for row in order]
    images = read_images([pictures[row] for row in order], input_, cache)
    if noisy:
        _warn_of_left_out(files, len(usable), images.reasons)
    else:
        _check_unreadable(items, images.reasons, files, data)
    halves = []
    for half in (slice(len(train)), slice(len(train), None)):
        readable = np.flatnonzero(images.rows[half] >= 0) + (half.start or 0)
        split = _examples(items, images, readable)
        halves.append(split if units is None else replace(split, units=units[order[readable]]))
    drawn = all(item.split != "test" for item in items)
    return halves[0], replace(halves[1], drawn=drawn)


def _split_rows(
    items: Sequence[IndexedFile], data: Data, units: Units | None, task: ClientTask
) -> tuple[Indices, Indices]:
    """Indices of the items to train on and to test."""
    train = np.array([row for row, item in enumerate(items) if item.split in (None, "train")], np.int64)
    test = np.array([row for row, item in enumerate(items) if item.split == "test"], np.int64)
    if not len(train) and not len(test):
        raise DataError(f"{data.root} has no images to train on or to test; expected some of the run's classes")
    # With noise the files' own split counts if it has no test image, too: a single one would decide for all others.
    if len(test) or (units is not None and items[0].split is not None):
        refuse_test_fraction(data)
        return train, test
    labels = task.strata(as_targets(np.array([items[row].target for row in train]))).numpy()
    group = np.array([items[row].group for row in train]) if items[train[0]].group is not None else None
    stay, drawn = draw_test_rows(labels, group, data, None if units is None else units[train])
    return train[stay], train[drawn]


def _units(items: Sequence[IndexedFile], cache: ImageCache | None) -> Units:
    if items and items[0].group is not None:
        return units_of_groups(np.array([item.group for item in items]))
    paths = [item.path for item in items]
    return units_of_files(paths) if cache is None else units_of_contents(cache.contents(list(map(FilePicture, paths))))


def _warn_of_left_out(files: Scan, usable: int, reasons: Sequence[str | None]) -> None:
    """For the site's people alone: in a run with noise no such image may decide whether the site takes part."""
    count = sum(files.unmapped.values()) + len(files.items) - usable + len(files.misplaced)
    if count := count + sum(reason is not None for reason in reasons):
        log.warning("images cannot be used and are left out; `protofed client check` lists them", count=count)


def _check_unreadable(items: Sequence[IndexedFile], reasons: Sequence[str | None], files: Scan, data: Data) -> None:
    unreadable = [(item.name, reason) for item, reason in zip(items, reasons, strict=True) if reason is not None]
    unreadable += [(name, "in no class's folder") for name in files.misplaced]
    count, total = len(unreadable), len(reasons) + len(files.misplaced)
    if count > data.max_unreadable_fraction * total:
        counts = Counter(reason for _, reason in unreadable)
        listed = ", ".join(f"{times} × {reason}" for reason, times in counts.most_common(MAX_REASONS))
        raise TooManyUnreadableError(
            f"{count} of {total} images cannot be read: {listed}{', …' if len(counts) > MAX_REASONS else ''}. "
            f"data.max_unreadable_fraction allows {data.max_unreadable_fraction:g}. Remove or replace these files, "
            "or raise this fraction. `protofed client check` lists the files",
            unreadable,
        )
    if count:
        log.warning("images cannot be read and are left out", count=count)


def _examples(items: Sequence[IndexedFile], images: ReadImages, readable: NDArray[np.intp]) -> DataSplit:
    """The split of `items[readable]`, which are views of the images."""
    targets = np.array([item.target for item in items])  # of all: where none is readable, dtype and shape are theirs
    labels = as_targets(targets[readable])
    columns = (
        ([items[row].site for row in readable], items[0].site),
        ([items[row].group for row in readable], items[0].group),
    )
    site, group = (None if first is None else np.array(column) for column, first in columns)
    examples = replace(images.examples(readable, labels), subgroups=_subgroups(items, readable))
    return DataSplit(examples, site, group)


def _subgroups(items: Sequence[IndexedFile], readable: NDArray[np.intp]) -> dict[str, torch.Tensor]:
    """As of `Examples`: one for each value of each column; an empty cell is in none."""
    columns = {name for item in items for name, _ in item.subgroups}
    cells = [dict(items[row].subgroups) for row in readable]
    masks = dict[str, torch.Tensor]()
    for column in sorted(columns):
        values = np.array([of_item[column] for of_item in cells], dtype=object)
        distinct = sorted({str(value) for value in values if value})
        if len(distinct) > MAX_SUBGROUPS:
            raise DataError(
                f"column '{short(column)}' of data.subgroup_columns has {len(distinct)} different values; expected at "
                f"most {MAX_SUBGROUPS}, such as parts of a range in place of numbers"
            )
        masks |= {f"{column}={value}": torch.from_numpy(values == value) for value in distinct}
    return masks


LABELLED_BY_NAME = frozenset({"folder", "manifest", "dicomweb"})  # sources whose labels are names, not numbers
_TRIED = 20  # files that are tried for one that can be read
_ANY_WINDOW = (0.0, 1.0)  # of an image whose shape alone counts: some files need one, which only a recipe sets
_LONGEST = 1024  # pixels a side of an image that no run asked for: photographs of a camera would fill the memory


@dataclass(frozen=True, eq=False)
class Source:
    """A whole source, before it is partitioned.

    Attributes:
        train: may be empty: an evaluator's .npz may have a test set only.
        test: the source's own, or held out, empty as of `split.draw_test_rows`; or what `split.draw_validation` drew.
        site_column: the site of each training example; None: the source does not say.
        test_site_column: likewise for the test examples.
        group_column: the group of each training example, such as a patient; None: there are none. Never shown.
        test_group_column: likewise for the test examples.
        units: of each training example, as of `DataSplit`; None: the run has no noise.
        drawn: the test examples were held out of the training examples.
    """

    train: Examples
    test: Examples
    site_column: Column | None = None
    test_site_column: Column | None = None
    group_column: Column | None = None
    test_group_column: Column | None = None
    units: Units | None = None
    drawn: bool = False

    @classmethod
    def from_splits(cls, train: DataSplit, test: DataSplit) -> Source:
        """The source of a training and a test split."""
        columns = train.site, test.site, train.group, test.group
        scored = test.examples
        if test.group is not None:  # resampled as a whole
            _, patients = np.unique(test.group, return_inverse=True)
            scored = replace(scored, units=torch.from_numpy(patients.astype(np.int64)))
        return cls(train.examples, scored, *columns, train.units, test.drawn)


def load(
    data: Data,
    input_: Input,
    class_names: Sequence[str] = (),
    reading: Reading = _READING,
    *,
    noisy: bool = False,
    task: ClientTask = CLASSES,
    classes: int | None = None,
) -> Source:
    """Load the source that `data` names; `site` adds its long tail and its partition.

    A relative or missing root is looked up in the folder that `PROTOFED_DATA` names, if set.

    Args:
        class_names: the run's class names; empty: the run has none, and then files cannot be used.
        reading: of image files.
        noisy: the run has `[plan.dp]`: each image, or patient, is held out by itself, and one that cannot be used is
            left out by itself: a refusal would tell of it.
        task: what the labels are read as.
        classes: C; None: as many as there are class names.

    Raises:
        DataError: the source is missing, unreadable, of another shape than the run's input, or has labels that are no
            class of the run.
    """
    if data.source in LABELLED_BY_NAME:
        train, test = read_files(data, input_, class_names, reading, noisy=noisy, task=task)
    else:
        of_task = task, len(class_names) if classes is None else classes
        train, test = _read_arrays(data, input_, class_names, reading, of_task, noisy=noisy)
    for split in (train, test):
        check_shape(split.examples, input_)
    if data.merge_test_into_train:
        return Source.from_splits(_joined(train, test), test.take(np.empty(0, np.int64)))
    train = _apart(train, test, noisy=noisy)
    if data.validation_fraction is not None:
        train, test = draw_validation(train, data.validation_fraction, data, task)
    if isinstance(data.partition, ColumnPartition):
        _check_sites(train, test)
    return Source.from_splits(train, test)


def _check_sites(train: DataSplit, test: DataSplit) -> None:
    """Refuse a test set, held out by groups, with all images of a site: the run would have a site less."""
    if not test.drawn or train.group is None or train.site is None or test.site is None:
        return
    if lost := sorted(set(test.site) - set(train.site)):
        raise DataError(
            f"the test set that is held out takes all images of site '{short(str(lost[0]))}', because a group stays "
            "whole. Check that data.group_pattern, or the column group, names patients and not whole sites, or hold "
            "out less"
        )


def infer_input(data: Data, reading: Reading = _READING) -> tuple[Input, int]:
    """An input with the images' own shape, and C for their labels: for checks before there is a run.

    If files differ in shape, this is the shape of the first file, shrunk to `_LONGEST` pixels a side. All files are
    fitted to it.

    Raises:
        DataError: the source is missing, unreadable, or has images that no run's input can be of.
    """
    if data.source in LABELLED_BY_NAME:
        return _first_shape(data), max(2, len(infer_class_names(data)))
    train, test = _read_arrays(data, None, (), reading, (CLASSES, 0))
    examples = train.examples if len(train.examples) else test.examples
    labels = torch.cat((train.examples.labels, test.examples.labels, torch.ones(1, dtype=torch.int64)))
    channels, height, width = examples.images.shape[1:]
    try:
        return Input(shape=(channels, height, width), fit="stretch", colours="convert"), int(labels.max()) + 1
    except ValidationError as error:
        raise DataError(
            f"source {data.source} has images of {channels} x {height} x {width} [channels, height, width]. "
            f"Expected at least one pixel, and at most {MAX_IMAGE_VALUES:,} values an image"
        ) from error


def infer_class_names(data: Data) -> tuple[str, ...]:
    """The class names that a source's own labels map to, sorted; empty for a source with numbers for labels.

    Raises:
        DataError: the source is missing or unreadable.
    """
    if data.source not in LABELLED_BY_NAME:
        return ()
    ignored = set(map(normalise, data.ignore_labels))
    mapped = {normalise(own): normalise(name) for own, name in data.label_map.items()}
    entries = image_files.list_files(data).entries
    return tuple(sorted({mapped.get(entry.label, entry.label) for entry in entries if entry.label not in ignored}))


def _first_shape(data: Data) -> Input:
    entries = image_files.list_files(data).entries
    if not entries:
        raise DataError(f"{data.root} lists no image; expected a folder of images for each class, or a row for each")
    for entry in entries[:_TRIED]:
        try:
            with silence_decoders():
                if entry.remote is not None:
                    image = dicomweb.open_image(entry.remote, _ANY_WINDOW, "middle")
                else:
                    image = open_image(entry.path, _ANY_WINDOW, "middle", entry.part)
        except UnreadableImageError:
            continue
        channels = 3 if image.mode == "RGB" else 1
        shrunk = max(1.0, image.height / _LONGEST, image.width / _LONGEST)
        height, width = (max(1, round(side / shrunk)) for side in (image.height, image.width))
        return Input(shape=(channels, height, width), fit="stretch", colours="convert", frames="middle")
    raise DataError(f"{data.root}: none of the first {min(_TRIED, len(entries))} files is an image that can be read")


def _read_arrays(
    data: Data,
    input_: Input | None,
    class_names: Sequence[str],
    reading: Reading,
    of_task: tuple[ClientTask, int],
    *,
    noisy: bool = False,
) -> tuple[DataSplit, DataSplit]:
    """The training and test splits with the run's labels; a missing training split is empty.

    Args:
        input_, reading: as of `arrays.read`.
        of_task: what the labels are read as, and C.
    """
    data = image_files.with_root(data)
    halves = (
        split and split.relabelled(*of_task, data, class_names, noisy=noisy)
        for split in arrays.read(data, input_, reading, noisy=noisy)
    )
    train, test = (split.with_units() if split is not None and noisy else split for split in halves)
    if test is not None:
        refuse_test_fraction(data)
        return train or DataSplit(test.examples.take(torch.empty(0, dtype=torch.int64))), test
    if train is None:
        raise DataError(f"source {data.source} has no images; expected some to train on or to test")
    strata = of_task[0].strata(train.examples.labels).numpy()
    train_rows, test_rows = draw_test_rows(strata, train.group, data, train.units)
    drawn = replace(train.take(test_rows), drawn=data.source not in BALANCED)
    return (train.take(train_rows) if len(test_rows) else train), drawn


def _joined(train: DataSplit, test: DataSplit) -> DataSplit:
    """One split of the training examples, then the test examples, with the columns that both have."""
    both = join(train.examples, test.examples)
    if (train.group is None) != (test.group is None):
        raise DataError("only one of train and test has groups; expected them in both, or in none")
    columns = ((train.site, test.site), (train.group, test.group), (train.units, test.units))
    site, group, units = (None if a is None or b is None else np.concatenate((a, b)) for a, b in columns)
    return DataSplit(both, site, group, units)


def _apart(train: DataSplit, test: DataSplit, *, noisy: bool) -> DataSplit:
    """The training split, whose groups are none of the test split's: else refused, with noise left out."""
    if not len(train.examples) or not len(test.examples) or train.group is None is test.group:
        return train
    if train.group is None or test.group is None:
        raise DataError("only one of train and test has groups; expected them in both, or in none")
    if noisy:
        return train.take(np.flatnonzero(~np.isin(train.group, test.group)))
    both = np.concatenate((train.group, test.group))
    parts = np.split(np.arange(len(both)), [len(train.group)])
    check_apart(both, parts, "train and test")
    return train
