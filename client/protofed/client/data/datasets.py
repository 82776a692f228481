"""A PyTorch dataset of a plug-in as a split: each item becomes an image of the run's input, a label and a patient."""

from __future__ import annotations

import operator
from collections.abc import Sized
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from protofed.client.data.decoding import Pixels, deepened, fit_planes, fit_to_input
from protofed.client.data.examples import Examples
from protofed.client.data.file_entry import UnreadableImageError
from protofed.client.data.split import DataSplit
from protofed.client.data.transforms import describe_problem, forked_generators
from protofed.common.config.tables import Input
from protofed.common.errors import DataError, short
from protofed.common.plugins import error_line

Items: TypeAlias = Dataset[Any]
_MODES = ("L", "RGB", "F")  # Pillow's modes of grey, colours, and grey in 0..1
_ITEM = "(image, label), or (image, label, patient)"
_IMAGE = "a PIL image (L or RGB), an array [H, W] or [H, W, channels], or a tensor [channels, H, W]"
_SEEDS = (1, 2)  # under both, an item must be the same
_CPU = torch.device("cpu")


class DatasetItem(NamedTuple):
    """An item of a dataset, checked.

    Attributes:
        image: of one or three channels, an image of mode L, RGB or F; else, or for colours that are floats, planes
            [channels, H, W] of uint8, or of float32 in 0..1.
        label: of a class, as the dataset numbers them.
        patient: whose it is, or another group that stays together; None: the dataset does not say.
    """

    image: Image.Image | Pixels
    label: int
    patient: str | None


def read_item(dataset: Items, number: int) -> DatasetItem:
    """The item of a number, counted from 0.

    Raises:
        DataError: the dataset raised something, or the item is none; names the number and what was expected.
    """
    try:
        item = dataset[number]
    except MemoryError:
        raise
    except Exception as error:  # foreign code: it may raise anything
        raise DataError(
            f"item {number} of the dataset cannot be read: {error_line(error)}; expected {_ITEM}"
        ) from error
    try:
        return check_item(item)
    except DataError as error:
        raise DataError(f"item {number} of the dataset: {error}") from error


def check_item(item: object) -> DatasetItem:
    """Check an item: an image, a label, and perhaps a patient.

    Raises:
        DataError: saying what was expected in its place.
    """
    if not isinstance(item, tuple | list) or len(item) not in (2, 3):
        size = f" of {len(item)} values" if isinstance(item, tuple | list) else ""
        raise DataError(f"a {type(item).__name__}{size}; expected {_ITEM}")
    image, label, patient = (*item, None)[:3]
    return DatasetItem(_read_image(image), _read_label(label), _read_patient(patient))


def fit_item(image: Image.Image | Pixels, input_: Input) -> Pixels:
    """The image of an item as the run's `[input]` says: [channels, H, W] as of `decode`.

    Raises:
        UnreadableImageError, ConfigError, DataError: as of `fit_to_input`; or it has other channels than the run.
    """
    if isinstance(image, Image.Image):
        return fit_to_input(image, input_)
    channels, wanted = len(image), input_.shape[0]
    if channels != wanted and input_.colours == "convert" and (channels, wanted) == (3, 1):
        red, green, blue = image
        luma = np.float32(0.299) * red + np.float32(0.587) * green + np.float32(0.114) * blue  # ITU-R 601, as Pillow
        return fit_planes(luma[np.newaxis].clip(0, 1), input_)
    if channels != wanted:
        raise UnreadableImageError(f"{channels} channels, and the run's input.shape has {wanted}")
    return fit_planes(image, input_)


def infer_item_input(dataset: Items) -> Input:
    """An input with the shape of the first item's image, to which the others are fitted.

    Raises:
        DataError: as of `read_item`.
    """
    image = read_item(dataset, 0).image
    planes = np.atleast_3d(np.asarray(image)).transpose(2, 0, 1) if isinstance(image, Image.Image) else image
    channels, height, width = planes.shape
    return Input(shape=(channels, height, width), fit="stretch", colours="convert")


def read_dataset(dataset: Items, input_: Input | None) -> DataSplit:
    """All items of a dataset, in memory, with patients as groups.

    Args:
        input_: None: as of `infer_item_input`.

    Raises:
        DataError: it has no length or no item, an item cannot be used (its number is named), only some have a patient,
            or the first is another one when it is read again.
    """
    count = _count_items(dataset)
    _check_repeatable(dataset)
    input_ = input_ or infer_item_input(dataset)
    images: NDArray[Any] = np.empty((count, *input_.shape), np.uint8)
    labels, patients = torch.empty(count, dtype=torch.int64), list[str | None]()
    for number in range(count):
        image, label, patient = read_item(dataset, number)
        try:
            pixels = fit_item(image, input_)
        except DataError as error:
            raise DataError(f"item {number} of the dataset: {error}") from error
        if pixels.dtype != np.uint8 and images.dtype == np.uint8:
            images = deepened(images)
        images[number] = pixels if pixels.dtype == images.dtype else deepened(pixels)
        labels[number] = label
        patients.append(patient)
    return DataSplit(Examples(torch.from_numpy(images), labels), group=_read_groups(patients))


def _count_items(dataset: Items) -> int:
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"the dataset is a {type(dataset).__name__} without a length; expected one with __len__ and __getitem__, "
            "not an IterableDataset"
        )
    if not (count := len(dataset)):
        raise DataError("the dataset has no items; expected at least one. A set that is not there is None")
    return count


def _check_repeatable(dataset: Items) -> None:
    """Raises DataError: the first item differs when it is read again, under other seeds."""
    read = []
    with forked_generators(_CPU) as seed:
        for number in _SEEDS:
            seed(number)
            read.append(read_item(dataset, 0))
    (image, *rest), (image_again, *rest_again) = read
    if rest != rest_again or not np.array_equal(np.asarray(image), np.asarray(image_again)):
        raise DataError(
            "item 0 of the dataset is another one each time it is read. protofed reads an item once and trains on it "
            "in all rounds. Remove the random transforms, and name them in the recipe's plan.augmentation"
        )


def _read_image(image: object) -> Image.Image | Pixels:
    if isinstance(image, Image.Image):
        if image.mode not in _MODES:
            raise DataError(f'the image has mode {image.mode}; expected L or RGB: image.convert("RGB")')
        _check_values(np.atleast_3d(np.asarray(image)).transpose(2, 0, 1))
        return image
    if isinstance(image, Tensor):
        planes = image.detach().cpu().numpy() if image.ndim == 3 else None
    else:
        planes = (
            np.atleast_3d(image).transpose(2, 0, 1) if isinstance(image, np.ndarray) and image.ndim in (2, 3) else None
        )
    if planes is None or not planes.size:
        shape = f" of shape {list(image.shape)}" if isinstance(image, Tensor | np.ndarray) else ""
        raise DataError(f"the image is a {type(image).__name__}{shape}; expected {_IMAGE}")
    return _as_image_if_any(_check_values(planes))


def _check_values(planes: Pixels) -> Pixels:
    """[channels, H, W] of uint8, or of float32 in 0..1."""
    if planes.dtype == np.uint8:
        return planes
    problem = (
        describe_problem(torch.from_numpy(np.array(planes)))
        if planes.dtype.kind == "f"
        else f"values of {planes.dtype}"
    )
    if problem:
        raise DataError(f"the image has {problem}; expected uint8, or floats from 0 to 1. Scale them in the dataset")
    return planes.astype(np.float32).clip(0, 1)


def _as_image_if_any(planes: Pixels) -> Image.Image | Pixels:
    """An image where Pillow has a mode for it, which then goes every file's way."""
    if len(planes) == 1:
        return Image.fromarray(np.ascontiguousarray(planes[0]))
    if len(planes) == 3 and planes.dtype == np.uint8:
        return Image.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0)))
    return planes


def _read_label(label: object) -> int:
    whole = label.numpy() if isinstance(label, Tensor) else np.asarray(label)
    if whole.ndim or whole.dtype.kind not in "iu":
        raise DataError(f"the label is {short(repr(label))}; expected a whole number, the number of the class")
    return operator.index(whole.item())


def _read_patient(patient: object) -> str | None:
    if patient is None:
        return None
    if isinstance(patient, Tensor | np.ndarray) and patient.ndim == 0:
        patient = patient.item()
    if isinstance(patient, bool) or not isinstance(patient, str | int | np.integer):
        raise DataError(f"the patient is a {type(patient).__name__}; expected a text or a whole number")
    return str(patient)


def _read_groups(patients: list[str | None]) -> NDArray[Any] | None:
    known = [patient is not None for patient in patients]
    if any(known) and not all(known):
        raise DataError(
            f"item {known.index(not known[0])} of the dataset has {'no' if known[0] else 'a'} patient, unlike item 0; "
            "expected a patient in each item, or in none"
        )
    return np.array(patients) if known[0] else None
