"""Where images come from: files in folders or in a manifest, an .npz, MedMNIST's and torchvision's sets.

Failures are DataErrors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from protofed.client.data import arrays, groups, image_files, reading
from protofed.client.data.decoding import opened, quiet
from protofed.client.data.image_error import UnreadableImageError
from protofed.client.data.labels import plain
from protofed.client.data.site_data import Examples, check_shape, no_examples
from protofed.client.data.split import Column as Column
from protofed.client.data.split import DataSplit, held_out, refuse_test_share
from protofed.common.config.recipe import Data, Input
from protofed.common.errors import DataError

NAMED = frozenset({"folder", "manifest"})  # sources whose labels are names
_TRIED = 20  # files, for one whose size can be told


@dataclass(frozen=True, eq=False)
class Source:
    """One source, whole.

    Attributes:
        train: may be empty: an evaluator's .npz may have a test set only.
        test: the source's own, or held out; empty with `data.merge_test_into_train`.
        site_column: of the training examples, where the source says which site each comes from.
        test_site_column: likewise of the test examples.
        group_column: of the training examples, where the source says which of them stay together; never shown.
        test_group_column: likewise of the test examples.
    """

    train: Examples
    test: Examples
    site_column: Column | None = None
    test_site_column: Column | None = None
    group_column: Column | None = None
    test_group_column: Column | None = None

    @classmethod
    def of(cls, train: DataSplit, test: DataSplit) -> Source:
        """Of its halves."""
        return cls(train.examples, test.examples, train.site, test.site, train.group, test.group)


def load(data: Data, input_: Input, class_names: Sequence[str] = ()) -> Source:
    """The source that `data` names; its partition and long tail are left to `site`.

    A root that is relative, or not given, is looked for in the folder that `PROTOFED_DATA` names, if it names one.

    Args:
        class_names: the run's classes by name; empty: it has only numbers, which files are not labelled with.

    Raises:
        DataError: it is missing, unreadable, of another shape than the run's input, or its labels mean nothing in the
            run.
    """
    train, test = _read(data, input_, class_names)
    for half in (train, test):
        check_shape(half.examples, input_)
    if data.merge_test_into_train:
        return Source.of(_joined(train, test), test.take(np.empty(0, np.int64)))
    _check_apart(train, test)
    return Source.of(train, test)


def own_input(data: Data) -> tuple[Input, int]:
    """The images' own shape, and classes enough for their labels: for whoever knows of no run yet.

    Files may differ in shape: then it is the first one's, and the others are brought to it.

    Raises:
        DataError: the source is missing or unreadable.
    """
    if data.source in NAMED:
        return _first_shape(data), max(2, len(own_class_names(data)))
    train, test = _read(data, Input(shape=(1, 1, 1)), ())
    examples = train.examples if len(train.examples) else test.examples
    labels = torch.cat((train.examples.labels, test.examples.labels, torch.ones(1, dtype=torch.int64)))
    channels, height, width = examples.images.shape[1:]
    return Input(shape=(channels, height, width)), int(labels.max()) + 1


def own_class_names(data: Data) -> tuple[str, ...]:
    """The classes that a source's own names come to, sorted; none of a source that has numbers.

    Raises:
        DataError: the source is missing or unreadable.
    """
    if data.source not in NAMED:
        return ()
    ignored, meant = (
        set(map(plain, data.ignore_labels)),
        {plain(own): plain(name) for own, name in data.label_map.items()},
    )
    entries, _ = image_files.listed(data)
    return tuple(sorted({meant.get(entry.label, entry.label) for entry in entries if entry.label not in ignored}))


def _first_shape(data: Data) -> Input:
    entries, _ = image_files.listed(data)
    for entry in entries[:_TRIED]:
        try:
            with quiet():
                image = opened(entry.path, None)
        except UnreadableImageError:
            continue
        channels = 3 if image.mode == "RGB" else 1
        return Input(shape=(channels, image.height, image.width), fit="stretch", colours="convert")
    raise DataError(f"{data.root}: none of the first {min(_TRIED, len(entries))} files is an image that can be read")


def _read(data: Data, input_: Input, class_names: Sequence[str]) -> tuple[DataSplit, DataSplit]:
    """With the run's classes; a source without training examples has none of `input_`'s shape."""
    if data.source in NAMED:
        return reading.read(data, input_, class_names)
    data = image_files.rooted(data)
    train, test = (half and half.relabelled(data, class_names) for half in arrays.read(data))
    if test is not None:
        refuse_test_share(data)
        return train or DataSplit(no_examples(input_)), test
    if train is None:
        raise DataError(f"source {data.source} has no images; expected some to train on or to test")
    kept, held = held_out(train.examples.labels.numpy(), train.group, data)
    return (train if data.merge_test_into_train else train.take(kept)), train.take(held)


def _joined(train: DataSplit, test: DataSplit) -> DataSplit:
    """Training examples, then test examples, with the columns that both have."""
    both = Examples(
        torch.cat((train.examples.images, test.examples.images)),
        torch.cat((train.examples.labels, test.examples.labels)),
    )
    if (train.group is None) != (test.group is None):
        raise DataError("only one of train and test has groups; expected them in both, or in none")
    columns = ((train.site, test.site), (train.group, test.group))
    site, group = (None if a is None or b is None else np.concatenate((a, b)) for a, b in columns)
    return DataSplit(both, site, group)


def _check_apart(train: DataSplit, test: DataSplit) -> None:
    """Groups on either side, where there are both sides."""
    if not len(train.examples) or not len(test.examples) or train.group is None is test.group:
        return
    if train.group is None or test.group is None:
        raise DataError("only one of train and test has groups; expected them in both, or in none")
    both = np.concatenate((train.group, test.group))
    parts = np.split(np.arange(len(both)), [len(train.group)])
    groups.check_apart(both, parts, "train and test")
