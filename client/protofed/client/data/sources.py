"""Load a source: files in folders or in a manifest, an .npz, MedMNIST's and torchvision's sets, plug-ins.

Every failure is a DataError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from pydantic import ValidationError

from protofed.client.data import arrays, groups, image_files, reading
from protofed.client.data.decoding import open_image, silence_decoders
from protofed.client.data.image_error import UnreadableImageError
from protofed.client.data.labels import normalise
from protofed.client.data.sides import Units
from protofed.client.data.site_data import Examples, check_shape, no_examples
from protofed.client.data.split import BALANCED, DataSplit, draw_test_rows, draw_validation, refuse_test_fraction
from protofed.client.data.split import Column as Column
from protofed.common.config.recipe import Data, Input
from protofed.common.config.tables import MAX_IMAGE_VALUES
from protofed.common.errors import DataError

LABELLED_BY_NAME = frozenset({"folder", "manifest"})  # sources whose labels are names, not numbers
_TRIED = 20  # files that are tried for one that can be read
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
        return cls(train.examples, test.examples, *columns, train.units, test.drawn)


def load(data: Data, input_: Input, class_names: Sequence[str] = (), *, noisy: bool = False) -> Source:
    """Load the source that `data` names; `site` adds its long tail and its partition.

    A relative or missing root is looked up in the folder that `PROTOFED_DATA` names, if set.

    Args:
        class_names: the run's class names; empty: the run has none, and then files cannot be used.
        noisy: the run has `[plan.dp]`: each image, or patient, is held out by itself, and one that cannot be used is
            left out by itself: a refusal would tell of it.

    Raises:
        DataError: the source is missing, unreadable, of another shape than the run's input, or has labels that are no
            class of the run.
    """
    train, test = _read(data, input_, class_names, noisy=noisy)
    for split in (train, test):
        check_shape(split.examples, input_)
    if data.merge_test_into_train:
        return Source.from_splits(_joined(train, test), test.take(np.empty(0, np.int64)))
    train = _apart(train, test, noisy=noisy)
    if data.validation_fraction is not None:
        train, test = draw_validation(train, data.validation_fraction, data)
    return Source.from_splits(train, test)


def infer_input(data: Data) -> tuple[Input, int]:
    """An input with the images' own shape, and C for their labels: for checks before there is a run.

    Files may differ in shape: then it is the shape of the first one, shrunk to `_LONGEST` pixels a side where it is
    larger, and all are fitted to it.

    Raises:
        DataError: the source is missing, unreadable, or has images that no run's input can be of.
    """
    if data.source in LABELLED_BY_NAME:
        return _first_shape(data), max(2, len(infer_class_names(data)))
    train, test = _read(data, Input(shape=(1, 1, 1)), ())  # any shape: `load` alone compares it with the images
    examples = train.examples if len(train.examples) else test.examples
    labels = torch.cat((train.examples.labels, test.examples.labels, torch.ones(1, dtype=torch.int64)))
    channels, height, width = examples.images.shape[1:]
    try:
        return Input(shape=(channels, height, width)), int(labels.max()) + 1
    except ValidationError as error:
        raise DataError(
            f"source {data.source} has images of {channels} x {height} x {width} [channels, height, width], of which "
            f"no run's input can be: expected at most {MAX_IMAGE_VALUES:,} values an image, and none of no pixels"
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
                image = open_image(entry.path, None)
        except UnreadableImageError:
            continue
        channels = 3 if image.mode == "RGB" else 1
        shrunk = max(1.0, image.height / _LONGEST, image.width / _LONGEST)
        height, width = (max(1, round(side / shrunk)) for side in (image.height, image.width))
        return Input(shape=(channels, height, width), fit="stretch", colours="convert")
    raise DataError(f"{data.root}: none of the first {min(_TRIED, len(entries))} files is an image that can be read")


def _read(data: Data, input_: Input, class_names: Sequence[str], *, noisy: bool = False) -> tuple[DataSplit, DataSplit]:
    """The training and test splits with the run's labels; a missing training split is empty, of `input_`'s shape."""
    if data.source in LABELLED_BY_NAME:
        return reading.read(data, input_, class_names, noisy=noisy)
    data = image_files.with_root(data)
    halves = (split and split.relabelled(data, class_names, noisy=noisy) for split in arrays.read(data))
    train, test = (split.with_units() if split is not None and noisy else split for split in halves)
    if test is not None:
        refuse_test_fraction(data)
        return train or DataSplit(no_examples(input_)), test
    if train is None:
        raise DataError(f"source {data.source} has no images; expected some to train on or to test")
    train_rows, test_rows = draw_test_rows(train.examples.labels.numpy(), train.group, data, train.units)
    drawn = replace(train.take(test_rows), drawn=data.source not in BALANCED)
    return (train.take(train_rows) if len(test_rows) else train), drawn


def _joined(train: DataSplit, test: DataSplit) -> DataSplit:
    """One split of the training examples, then the test examples, with the columns that both have."""
    both = Examples(
        torch.cat((train.examples.images, test.examples.images)),
        torch.cat((train.examples.labels, test.examples.labels)),
    )
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
    groups.check_apart(both, parts, "train and test")
    return train
