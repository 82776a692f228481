"""A PyTorch dataset of a plug-in as a split: each item becomes an image of the run's input, a label and a patient."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from protofed.client.data.decoding import Pixels, fit_planes, fit_to_input
from protofed.client.data.file_entry import DIGEST_BYTES, UnreadableImageError
from protofed.client.data.labels import as_targets
from protofed.client.data.pictures import DecodedPicture, Facts, digest_module
from protofed.client.data.reading import ReadImages, Reading, image_cache_for, read_images
from protofed.client.data.split import DataSplit
from protofed.client.data.transforms import describe_problem, forked_generators
from protofed.client.task import Target, as_target
from protofed.common.config.data import SOURCES, Data
from protofed.common.config.tables import Input
from protofed.common.errors import DataError, short
from protofed.common.plugins import PluginKind, error_line, load

Items: TypeAlias = Dataset[Any]
Half: TypeAlias = Items | DataSplit | None
_MODES = ("L", "RGB", "F")  # Pillow's modes of grey, colours, and grey in 0..1
_ITEM = "(image, label), or (image, label, patient)"
_HALVES = "a torch.utils.data.Dataset, or two of them or DataSplits, training and test; either may be None"
_STAMP = "expected a text that changes with the item's image, label or patient"
_DECIDING = ("source", "options", "root", "dataset", "seed")  # settings that a plug-in's items follow from
_IMAGE = "a PIL image (L or RGB), an array [H, W] or [H, W, channels], or a tensor [channels, H, W]"
_SEEDS = (1, 2)  # under both, an item must be the same
_CPU = torch.device("cpu")
log = structlog.get_logger()


class DatasetItem(NamedTuple):
    """An item of a dataset, checked.

    Attributes:
        image: of one or three channels, an image of mode L, RGB or F; else, or for colours that are floats, planes
            [channels, H, W] of uint8, or of float32 in 0..1.
        label: the number of a class, as the dataset numbers them, or the targets of another task.
        patient: whose it is, or another group that stays together; None: the dataset does not say.
    """

    image: Image.Image | Pixels
    label: Target
    patient: str | None


def read_item(dataset: Items, number: int) -> DatasetItem:
    """The item of a number, counted from 0.

    Raises:
        UnreadableImageError: the dataset raised something, or the item is none; names the number and what was expected.
    """
    try:
        item = dataset[number]
    except MemoryError:
        raise
    except Exception as error:  # foreign code: it may raise anything
        raise UnreadableImageError(
            f"item {number} of the dataset cannot be read: {error_line(error)}; expected {_ITEM}"
        ) from error
    try:
        return check_item(item)
    except DataError as error:
        raise UnreadableImageError(f"item {number} of the dataset: {error}") from error


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
        UnreadableImageError: as of `read_item`.
    """
    image = read_item(dataset, 0).image
    planes = np.atleast_3d(np.asarray(image)).transpose(2, 0, 1) if isinstance(image, Image.Image) else image
    channels, height, width = planes.shape
    return Input(shape=(channels, height, width), fit="stretch", colours="convert")


@dataclass(frozen=True)
class DatasetSource:
    """A dataset, and how another process opens it again.

    Attributes:
        dataset: a plug-in's.
        data: the settings that the plug-in got, as JSON; empty: it is in memory alone.
        half: which of its halves it is, 0 for training, 1 for test.
        key: of the plug-in, its code and its settings.
    """

    dataset: Items
    data: str = ""
    half: int = 0
    key: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens it anew: what it holds may be large, or a handle of a file."""
        return _reopen, (self.data, self.half, self.key)

    def pictures(self) -> list[ItemPicture]:
        """All items.

        Raises:
            DataError: it has no length or no item, or the first is another one when it is read again.
        """
        count = _count_items(self.dataset)
        _check_repeatable(self.dataset)
        return [ItemPicture(self, number) for number in range(count)]


class ItemPicture(NamedTuple):
    """An item of a dataset."""

    source: DatasetSource
    number: int

    @property
    def key(self) -> str:
        """As of `StoredPicture`."""
        return _digest(self.source.key, self.source.half, self.number)

    @property
    def part(self) -> str:
        """As of `StoredPicture`."""
        return ""

    @property
    def serial(self) -> bool:
        """As of `StoredPicture`: a dataset need not be safe for threads."""
        return True

    def stamp(self) -> str:
        """What the dataset's own `stamp` says, if it has one.

        Raises:
            DataError: it failed, or gave something else than a text.
        """
        stamp = getattr(self.source.dataset, "stamp", None)
        if stamp is None:
            return ""
        try:
            value = stamp(self.number)
        except Exception as error:  # foreign code: it may raise anything
            raise DataError(f"stamp({self.number}) of the dataset failed: {error_line(error)}; {_STAMP}") from error
        if not isinstance(value, str) or not value:
            raise DataError(f"stamp({self.number}) of the dataset gave {short(repr(value))}; {_STAMP}")
        return value

    def content(self) -> str:
        """A digest of the stamp, or of image, label and patient."""
        if stamp := self.stamp():
            return _digest(self.key, stamp)
        try:
            image, label, patient = read_item(self.source.dataset, self.number)
        except UnreadableImageError:
            return ""
        values = np.ascontiguousarray(image)
        return _digest(values.dtype, values.shape, values.tobytes(), label, patient)

    def decode(self, input_: Input) -> DecodedPicture:
        """As `read_item` and `fit_item`."""
        image, label, patient = read_item(self.source.dataset, self.number)
        try:
            pixels = fit_item(image, input_)
        except UnreadableImageError as error:
            raise UnreadableImageError(f"item {self.number} of the dataset: {error}") from error
        return DecodedPicture(pixels, Facts(label, None if patient is None else _digest("patient", patient)))


def read_datasets(
    sources: Sequence[DatasetSource | None], data: Data, input_: Input | None, reading: Reading, *, noisy: bool = False
) -> list[DataSplit | None]:
    """All items of some datasets as one array, with patients as groups; None where there is no dataset.

    Args:
        input_: None: as of `infer_item_input`.
        noisy: as of `sources.load`: items that cannot be used are left out.

    Raises:
        DataError: a dataset has no length or no item, the first item is another one when it is read again, only some
            have a patient, or more cannot be used than `data.max_unreadable_fraction` allows (names one of them).
    """
    pictures = [source.pictures() if source is not None else [] for source in sources]
    together = [picture for some in pictures for picture in some]
    if not together:
        return [None for _ in sources]
    input_ = input_ or infer_item_input(together[0].source.dataset)
    read = read_images(together, input_, image_cache_for(together, input_, reading))
    bad = [reason for reason in read.reasons if reason is not None]
    if not noisy and len(bad) > data.max_unreadable_fraction * len(together):
        raise _unusable(bad, len(together), data.max_unreadable_fraction)
    if bad:
        log.warning("images cannot be used and are left out", count=len(bad))
    halves = np.split(np.arange(len(together)), np.cumsum([len(some) for some in pictures])[:-1])
    return [
        _read_split(read, together, places[read.rows[places] >= 0], noisy=noisy) if len(places) else None
        for places in halves
    ]


def read_dataset(dataset: Items, input_: Input | None) -> DataSplit:
    """All items of a dataset, in memory, with patients as groups.

    Raises:
        DataError: as `read_datasets`; or an item cannot be used.
    """
    pictures = DatasetSource(dataset).pictures()
    read = read_images(pictures, input_ or infer_item_input(dataset), None)
    if bad := [reason for reason in read.reasons if reason is not None]:
        raise _unusable(bad, len(pictures), 0)
    return _read_split(read, pictures, np.arange(len(pictures)), noisy=False)


def _unusable(reasons: Sequence[str], count: int, allowed: float) -> DataError:
    return DataError(
        f"{reasons[0]}. {len(reasons)} of {count} items cannot be used, and data.max_unreadable_fraction allows "
        f"{allowed:g}"
    )


def _read_split(
    read: ReadImages, pictures: Sequence[ItemPicture], places: NDArray[np.intp], *, noisy: bool
) -> DataSplit:
    facts = [read.facts[place] for place in places]
    known = np.array([group is not None for _, group in facts], bool)
    if known.any() and not known.all():
        if not noisy:
            first, odd = (pictures[place].number for place in (places[0], places[known != known[0]][0]))
            raise DataError(
                f"item {odd} of the dataset has {'no' if known[0] else 'a'} patient, unlike item {first}; expected a "
                "patient in each item, or in none"
            )
        places, facts = places[known], [fact for fact in facts if fact.group is not None]
    labels = as_targets(np.array([label for label, _ in facts]))
    group = np.array([group for _, group in facts]) if known.any() else None
    return DataSplit(read.examples(places, labels), group=group)


def open_plugin(data: Data) -> tuple[Half, Half]:
    """What the plug-in that is `data.source` gives: datasets or splits, for training and for tests.

    Raises:
        ConfigError: as `plugins.load`.
        DataError: it raised something, or gave something else.
    """
    read = load(PluginKind.DATASET, data.source, SOURCES)
    try:
        result = read(data)
    except Exception as error:  # foreign code: it may raise anything
        raise DataError(f"source '{data.source}' failed: {error_line(error)}; expected {_HALVES}") from error
    halves = (result, None) if isinstance(result, Dataset) else result
    if isinstance(halves, tuple | list) and len(halves) == 2:
        train, test = halves
        if isinstance(train, Dataset | DataSplit | None) and isinstance(test, Dataset | DataSplit | None):
            return train, test
    raise DataError(f"source '{data.source}' gave a {type(result).__name__}; expected {_HALVES}")


def read_plugin(
    data: Data, input_: Input | None, reading: Reading, *, noisy: bool
) -> tuple[DataSplit | None, DataSplit | None]:
    """The splits of the plug-in that is `data.source`, its datasets as of `read_datasets`.

    Raises:
        ConfigError, DataError: as `open_plugin` and `read_datasets`.
    """
    halves = open_plugin(data)
    key = _digest(
        *(data.model_dump_json(include={name}) for name in _DECIDING),
        digest_module(load(PluginKind.DATASET, data.source, SOURCES)),
    )
    whole = data.model_dump_json(exclude_defaults=True)
    sources = [
        DatasetSource(half, whole, place, key) if isinstance(half, Dataset) else None
        for place, half in enumerate(halves)
    ]
    try:
        read = read_datasets(sources, data, input_, reading, noisy=noisy)
    except DataError as error:
        raise DataError(f"source '{data.source}': {error}") from error
    train, test = (half if isinstance(half, DataSplit) else made for half, made in zip(halves, read, strict=True))
    return train, test


@lru_cache(maxsize=1)
def _opened(data: str) -> tuple[Half, Half]:
    return open_plugin(Data.model_validate_json(data))


def _reopen(data: str, half: int, key: str) -> DatasetSource:
    dataset = _opened(data)[half]
    if not isinstance(dataset, Dataset):
        raise DataError("the plug-in gives another kind of dataset each time; expected the same one")
    return DatasetSource(dataset, data, half, key)


def _digest(*values: object) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for value in values:
        whole = value if isinstance(value, bytes) else str(value).encode()
        digest.update(len(whole).to_bytes(8) + whole)
    return digest.hexdigest()


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
    with suppress(UnreadableImageError), forked_generators(_CPU) as seed:
        for number in _SEEDS:
            seed(number)
            read.append(read_item(dataset, 0))
    if not read:
        return
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


def _read_label(label: object) -> Target:
    try:
        return as_target(label)
    except DataError as error:
        raise DataError(f"the label is {short(repr(label))}; {error}") from error


def _read_patient(patient: object) -> str | None:
    if patient is None:
        return None
    if isinstance(patient, Tensor | np.ndarray) and patient.ndim == 0:
        patient = patient.item()
    if isinstance(patient, bool) or not isinstance(patient, str | int | np.integer):
        raise DataError(f"the patient is a {type(patient).__name__}; expected a text or a whole number")
    return str(patient)
