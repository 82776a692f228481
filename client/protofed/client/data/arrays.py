"""Sources of arrays with numbers for labels: digits, a spiral, an .npz, torchvision's and MedMNIST's sets, plug-ins.

Each answers with its training half and, where it has one, its test half. Failures are DataErrors.
"""

from __future__ import annotations

import warnings
import zipfile
import zlib
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.client.data.datasets import read_plugin
from protofed.client.data.examples import Examples
from protofed.client.data.labels import as_targets
from protofed.client.data.reading import Reading
from protofed.client.data.split import Column, DataSplit
from protofed.common.config.data import Data
from protofed.common.config.tables import Input
from protofed.common.errors import DataError, unknown
from protofed.common.process import give_back
from protofed.common.version import install_hint

Arrays: TypeAlias = tuple[NDArray[Any], NDArray[Any]]  # images [N, H, W] or [N, H, W, channels], labels [N] or [N, L]
Halves: TypeAlias = tuple[DataSplit | None, DataSplit | None]

_TORCHVISION = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "mnist": "MNIST", "fashion-mnist": "FashionMNIST"}
_COLUMNS = ("site", "group")
_ARMS, _ARM_POINTS = 6, 800
_ARM_TURN = 0.55 * 2 * np.pi  # radians of an arm from its inner to its outer end
_ANGLE_STD = 0.1  # radians; neighbouring arms are 2 pi / 6 = 1.05 apart, so that classes do not overlap
# What NumPy, torchvision and medmnist raise on files that are missing, damaged or something else.
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


def read(data: Data, input_: Input | None, reading: Reading, *, noisy: bool = False) -> Halves:
    """The source that `data` names, as it stands.

    Args:
        input_: what the images of a PyTorch dataset are fitted to; None: the first image's shape. Arrays stay as they
            are.
        reading: of a PyTorch dataset.
        noisy: as of `sources.load`.

    Raises:
        DataError: it is missing or unreadable.
    """
    match data.source:
        case "digits":
            return _digits(), None
        case "spiral":
            return DataSplit(_spiral(data.seed)), None
        case "npz":
            return _npz(data)
        case "medmnist":
            return _medmnist(data)
        case name if name in _TORCHVISION:
            return _torchvision(_TORCHVISION[name], data)
        case _:
            return read_plugin(data, input_, reading, noisy=noisy)


def _digits() -> DataSplit:
    """1,797 handwritten digits of 8 x 8 pixels with 17 shades of grey."""
    from sklearn.datasets import load_digits  # a second of imports that only this source needs

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
    return DataSplit(Examples(images, torch.from_numpy(digits.target).long()))


def _spiral(seed: int) -> Examples:
    """4,800 points on the arms of a spiral, a class an arm, as images [4800, 1, 1, 2]: x and y in 0..1.

    An embedding of two features can be drawn, as Dai et al. (AAAI 2023) do.
    """
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(_ARMS), _ARM_POINTS)
    along = rng.uniform(0, 1, len(labels))  # 0: the inner end, 1: the outer one
    angle = 2 * np.pi * labels / _ARMS + _ARM_TURN * along + rng.normal(0, _ANGLE_STD, len(labels))
    radius = 0.05 + 0.45 * along
    points = 0.5 + radius[:, None] * np.stack((np.cos(angle), np.sin(angle)), axis=1)  # [N, 2]
    images = torch.from_numpy(points.astype(np.float32)).reshape(-1, 1, 1, 2)
    return Examples(images, torch.from_numpy(labels))


def _torchvision(name: str, data: Data) -> Halves:
    root = _folder(data)
    return _torchvision_half(name, root, data, train=True), _torchvision_half(name, root, data, train=False)


def _torchvision_half(name: str, root: Path, data: Data, train: bool) -> DataSplit:
    from torchvision import datasets  # seconds of imports that only these sources need

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy on the age of CIFAR's own files
            dataset = getattr(datasets, name)(str(root), train=train, download=data.download)
        give_back()  # torchvision joins the files' arrays, and leaves as much free
        return DataSplit(_examples((np.asarray(dataset.data), np.asarray(dataset.targets))))
    except _FOREIGN as error:
        raise _unusable(name, data, error) from error


def _medmnist(data: Data) -> Halves:
    """`dataset` as in the names of MedMNIST's files: dermamnist, dermamnist_224; `val` is left alone."""
    root, (name, _, size) = _folder(data), (data.dataset or "").partition("_")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import medmnist  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise DataError(f"source medmnist needs its library: {install_hint('medmnist')}") from error
    flat = [known for known in medmnist.INFO if not known.endswith("3d")]
    if name not in flat or size not in ("", "64", "128", "224"):
        raise DataError(str(unknown("data.dataset", data.dataset or "", flat)))
    dataset_class = getattr(medmnist, medmnist.INFO[name]["python_class"])
    try:
        halves = [
            dataset_class(split=half, root=str(root), download=data.download, size=int(size or 28))
            for half in ("train", "test")
        ]
        train, test = (DataSplit(_examples((half.imgs, half.labels))) for half in halves)
    except _FOREIGN as error:
        raise _unusable(f"{data.dataset}.npz", data, error) from error
    return train, test


def _folder(data: Data) -> Path:
    if data.root is None:
        raise DataError(
            f"source {data.source} has no data.root; set it, or PROTOFED_DATA, to the folder that has or gets the set"
        )
    return data.root


def _unusable(name: str, data: Data, error: Exception) -> DataError:
    todo = "check the network and the folder" if data.download else "set data.download = true or data.root"
    return DataError(f"no usable {name} in {data.root} ({_line(error)}); {todo}")


def _npz(data: Data) -> Halves:
    """MedMNIST's keys; `val_*` is left alone."""
    arrays = _read_npz(data.root)
    train, test = (_half(arrays, half, data.root) for half in ("train", "test"))
    if train is None and test is None:
        raise DataError(f"{data.root} has neither train_images nor test_images; expected MedMNIST's keys")
    return train, test


def _read_npz(path: Path | None) -> dict[str, NDArray[Any]]:
    if path is None:
        raise DataError("source npz has no data.root; set it to the .npz file")
    expected = "expected an .npz of plain arrays train_images, train_labels, test_images, test_labels"
    keys = [f"{half}_{kind}" for half in ("train", "test") for kind in ("images", "labels", *_COLUMNS)]
    try:
        # NumPy itself leaves a damaged file open
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {key: archive[key] for key in keys if key in archive}
    except FileNotFoundError as error:
        raise DataError(
            f"there is no file {path}; set data.root to it, or PROTOFED_DATA to the folder that it is in; {expected}"
        ) from error
    except _FOREIGN as error:
        raise DataError(f"cannot read {path} ({_line(error)}); {expected}") from error


def _half(arrays: dict[str, NDArray[Any]], half: str, path: Path | None) -> DataSplit | None:
    images, labels = (arrays.get(f"{half}_{kind}") for kind in ("images", "labels"))
    if images is None and labels is None:
        return None
    if images is None or labels is None:
        raise DataError(f"{path} has only one of {half}_images and {half}_labels; expected both")
    try:
        examples = _examples((images, labels))
    except DataError as error:
        raise DataError(f"{path}, {half}: {error}") from error
    site, group = (_column(arrays, f"{half}_{kind}", len(examples), path) for kind in _COLUMNS)
    return DataSplit(examples, site, group)


def _column(arrays: dict[str, NDArray[Any]], key: str, count: int, path: Path | None) -> Column | None:
    column = arrays.get(key)
    if column is not None and column.shape != (count,):
        raise DataError(f"{path}: {key} has shape {list(column.shape)}; expected one value for each image")
    return column


def _examples(arrays: Arrays) -> Examples:
    """Channels first, and single labels without MedMNIST's second axis."""
    images, labels = arrays
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise DataError(
            f"images are {images.dtype} of shape {list(images.shape)}; expected uint8 of shape "
            "[N, height, width] or [N, height, width, channels]"
        )
    if labels.dtype.kind not in "iufb" or labels.ndim not in (1, 2) or len(labels) != len(images):
        raise DataError(
            f"labels are {labels.dtype} of shape {list(labels.shape)}; expected numbers, one or a row of them for each "
            f"of {len(images)} images"
        )
    labels = labels.reshape(-1) if labels.shape[1:] == (1,) else labels
    first = np.expand_dims(images, 1) if images.ndim == 3 else np.moveaxis(images, 3, 1)
    return Examples(torch.from_numpy(first.copy()), as_targets(labels))


def _line(error: BaseException) -> str:
    """A foreign error's first sentence, in one line: what follows is advice to callers of NumPy and torchvision."""
    return " ".join(str(error).split()).partition(". ")[0][:200] or type(error).__name__
