"""Where images come from: scikit-learn's digits, points on a spiral, a MedMNIST-style .npz, a torchvision set.

Failures are DataErrors.
"""

from __future__ import annotations

import os
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.client.data.examples import Examples, check_shape, no_examples
from protofed.client.data.spiral import spiral
from protofed.common.errors import DataError
from protofed.common.recipe import Data, Input

Column: TypeAlias = NDArray[Any]  # [N], one value an example
Arrays: TypeAlias = tuple[NDArray[Any], NDArray[Any]]  # images [N, H, W] or [N, H, W, channels], labels [N] or [N, 1]

TEST_SHARE = 0.3  # of a source without a test set, unless data.test_share says otherwise
_TORCHVISION = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "mnist": "MNIST", "fashion-mnist": "FashionMNIST"}
_SITES = ("train_site", "test_site")
# What NumPy and torchvision raise on files that are missing, damaged or something else.
_FOREIGN = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AssertionError,
    HTTPException,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, eq=False)
class Source:
    """One source, whole.

    Attributes:
        train: may be empty: an evaluator's .npz may have a test set only.
        test: the source's own, or held out; empty with `data.merge`.
        site_column: of the training examples, where the source says which site each comes from.
        test_site_column: likewise of the test examples.
    """

    train: Examples
    test: Examples
    site_column: Column | None = None
    test_site_column: Column | None = None


def load(data: Data, input_: Input) -> Source:
    """The source that `data` names; its partition and long tail are left to `site`.

    A root that is relative, or not given, is looked for in the folder that `PROTOFED_DATA` names, if it names one.

    Raises:
        DataError: it is missing, unreadable, or of another shape than the run's input.
    """
    source = _read(data, input_)
    for examples in (source.train, source.test):
        check_shape(examples, input_)
    return _merged(source) if data.merge else source


def own_input(data: Data) -> tuple[Input, int]:
    """The images' own shape, and classes enough for their labels: for whoever knows of no run yet.

    Raises:
        DataError: the source is missing or unreadable.
    """
    source = _read(data, Input(shape=(1, 1, 1)))
    examples = source.train if len(source.train) else source.test
    labels = torch.cat((source.train.labels, source.test.labels, torch.ones(1, dtype=torch.int64)))
    channels, height, width = examples.images.shape[1:]
    return Input(shape=(channels, height, width)), int(labels.max()) + 1


def _read(data: Data, input_: Input) -> Source:
    """As it stands; a source without training examples has none of `input_`'s shape."""
    if folder := os.environ.get("PROTOFED_DATA"):
        data = data.model_copy(update={"root": Path(folder) / (data.root or "")})
    match data.source:
        case "digits":
            return _held_out(_digits(), data)
        case "spiral":
            return _held_out(spiral(data.seed), data)
        case "npz":
            return _npz(data, input_)
        case name:
            return _torchvision(_TORCHVISION[name], data)


def _digits() -> Examples:
    """1,797 handwritten digits of 8 x 8 pixels with 17 shades of grey."""
    from sklearn.datasets import load_digits  # a second of imports that only this source needs

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
    return Examples(images, torch.from_numpy(digits.target).long())


def _torchvision(name: str, data: Data) -> Source:
    _refuse_test_share(data)
    if data.root is None:
        raise DataError(
            f"source {data.source} has no data.root; set it, or PROTOFED_DATA, to the folder that has or gets the set"
        )
    return Source(_torchvision_half(name, data, train=True), _torchvision_half(name, data, train=False))


def _torchvision_half(name: str, data: Data, train: bool) -> Examples:
    from torchvision import datasets  # seconds of imports that only these sources need

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy on the age of CIFAR's own files
            found = getattr(datasets, name)(str(data.root), train=train, download=data.download)
        return _examples((np.asarray(found.data), np.asarray(found.targets)))
    except _FOREIGN as error:
        todo = "check the network and the folder" if data.download else "set data.download = true or data.root"
        raise DataError(f"no usable {name} in {data.root} ({_line(error)}); {todo}") from error


def _npz(data: Data, input_: Input) -> Source:
    """MedMNIST's keys; `val_*` is left alone."""
    arrays = _read_npz(data.root)
    train, test = (_half(arrays, half, data.root) for half in ("train", "test"))
    site_columns = [arrays.get(key) for key in _SITES]
    for key, column, examples in zip(_SITES, site_columns, (train, test), strict=True):
        if column is not None and column.shape != (len(examples or ()),):
            raise DataError(f"{data.root}: {key} has shape {list(column.shape)}; expected one value for each image")
    if test is not None:
        _refuse_test_share(data)
        return Source(train or no_examples(input_), test, *site_columns)
    if train is None:
        raise DataError(f"{data.root} has neither train_images nor test_images; expected MedMNIST's keys")
    return _held_out(train, data, site_columns[0])


def _read_npz(path: Path | None) -> dict[str, NDArray[Any]]:
    if path is None:
        raise DataError("source npz has no data.root; set it to the .npz file")
    wanted = [f"{half}_{kind}" for half in ("train", "test") for kind in ("images", "labels", "site")]
    try:
        # NumPy itself leaves a damaged file open
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {key: archive[key] for key in wanted if key in archive}
    except _FOREIGN as error:
        raise DataError(
            f"cannot read {path} ({_line(error)}); expected an .npz of plain arrays train_images, train_labels, "
            "test_images, test_labels"
        ) from error


def _half(arrays: dict[str, NDArray[Any]], half: str, path: Path | None) -> Examples | None:
    images, labels = (arrays.get(f"{half}_{kind}") for kind in ("images", "labels"))
    if images is None and labels is None:
        return None
    if images is None or labels is None:
        raise DataError(f"{path} has only one of {half}_images and {half}_labels; expected both")
    try:
        return _examples((images, labels))
    except DataError as error:
        raise DataError(f"{path}, {half}: {error}") from error


def _examples(arrays: Arrays) -> Examples:
    """Channels first, and labels without MedMNIST's second axis."""
    images, labels = arrays
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise DataError(
            f"images are {images.dtype} of shape {list(images.shape)}; expected uint8 of shape "
            "[N, height, width] or [N, height, width, channels]"
        )
    if labels.dtype.kind not in "iu" or labels.shape not in ((len(images),), (len(images), 1)):
        raise DataError(
            f"labels are {labels.dtype} of shape {list(labels.shape)}; expected whole numbers, one for each of "
            f"{len(images)} images"
        )
    first = np.expand_dims(images, 1) if images.ndim == 3 else np.moveaxis(images, 3, 1)
    return Examples(torch.from_numpy(first.copy()), torch.from_numpy(labels.reshape(-1).astype(np.int64)))


def _merged(source: Source) -> Source:
    """Training examples, then test examples, as one training set with its column; the test set is empty."""
    train, test = source.train, source.test
    merged = Examples(torch.cat((train.images, test.images)), torch.cat((train.labels, test.labels)))
    if source.site_column is None or source.test_site_column is None:
        return Source(merged, _none_of(test))
    return Source(merged, _none_of(test), np.concatenate((source.site_column, source.test_site_column)))


def _none_of(examples: Examples) -> Examples:
    return examples.take(torch.empty(0, dtype=torch.int64))


def _held_out(examples: Examples, data: Data, column: Column | None = None) -> Source:
    """A test set with as many examples of every class, drawn by data.seed: the share of what the rarest class has.

    With `data.merge` it is empty: what is held out would only come back.

    Raises:
        DataError: that share is less than one example.
    """
    if data.merge:
        return Source(examples, _none_of(examples), column, None if column is None else column[:0])
    share = TEST_SHARE if data.test_share is None else data.test_share
    labels = examples.labels.numpy()
    present, sizes = np.unique(labels, return_counts=True)
    each = int(share * sizes.min(initial=len(labels)))
    if not each:
        raise DataError(
            f"holding out {share:g} of the rarest class's {sizes.min(initial=len(labels))} examples leaves no test "
            "set; add test_images and test_labels, or raise data.test_share"
        )
    rng = np.random.default_rng(data.seed)
    drawn = [rng.choice(np.flatnonzero(labels == c), each, replace=False) for c in present]
    out = np.zeros(len(labels), dtype=bool)
    out[np.concatenate(drawn)] = True
    train, test = np.flatnonzero(~out), np.flatnonzero(out)
    site_columns = [None if column is None else column[rows] for rows in (train, test)]
    return Source(examples.take(torch.from_numpy(train)), examples.take(torch.from_numpy(test)), *site_columns)


def _refuse_test_share(data: Data) -> None:
    if data.test_share is not None:
        raise DataError(f"source {data.source} has a test set of its own; remove data.test_share")


def _line(error: BaseException) -> str:
    """A foreign error's first sentence, in one line: what follows is advice to callers of NumPy and torchvision."""
    return " ".join(str(error).split()).partition(". ")[0][:200] or type(error).__name__
