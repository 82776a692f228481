"""A PyTorch dataset of a plug-in: items become images of the run's input, or are refused by their number."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.image_files import STEP, ramp
from torch.utils.data import Dataset, IterableDataset

from protofed.client.data import arrays, image_cache
from protofed.client.data.datasets import check_item, infer_item_input, read_dataset
from protofed.client.data.decoding import in_unit
from protofed.client.data.decoding_processes import decode_onto
from protofed.client.data.reading import Reading
from protofed.client.data.sources import Source, load
from protofed.common import plugins
from protofed.common.config.data import Data
from protofed.common.config.settings import Cache
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

GREY, RGB = ramp(4, 4, 1), ramp(4, 4, 3)  # [H, W], [H, W, 3]
PLANES = torch.from_numpy(RGB).permute(2, 0, 1)  # [3, H, W]
UNIT = PLANES / 255


class Listed(Dataset[Any]):
    """A dataset of items in memory, or of functions that make them."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> Any:
        item = self._items[number]
        return item() if callable(item) else item


class Streamed(IterableDataset[Any]):
    """A dataset that cannot be indexed."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(GREY, 0)])


def run(channels: int, height: int = 4, width: int = 4, **more: Any) -> Input:
    return Input.model_validate({"shape": (channels, height, width), **more})


@pytest.mark.parametrize(
    ("image", "channels"),
    [
        (Image.fromarray(GREY), 1),
        (Image.fromarray(RGB), 3),
        (GREY, 1),
        (RGB, 3),
        (GREY[:, :, None], 1),
        (PLANES, 3),
        (UNIT, 3),
        (UNIT.double().numpy().transpose(1, 2, 0), 3),
        (UNIT[:1], 1),
        (torch.from_numpy(np.stack([GREY] * 5)), 5),
    ],
)
def test_an_image_may_be_pillows_numpys_or_pytorchs_of_bytes_or_of_0_to_1(image: Any, channels: int) -> None:
    split = read_dataset(Listed([(image, 1)]), run(channels))
    expected = np.atleast_3d(RGB if channels == 3 else GREY).transpose(2, 0, 1)
    if isinstance(image, torch.Tensor) and channels == 1:
        expected = PLANES[:1].numpy()
    made = split.examples.pixels()[0].numpy()
    assert made.dtype == (np.uint8 if np.asarray(image).dtype == np.uint8 else np.uint16)
    np.testing.assert_allclose(in_unit(made), np.broadcast_to(expected / np.float32(255), made.shape), atol=STEP)


@pytest.mark.parametrize("label", [2, np.int64(2), np.uint8(2), torch.tensor(2), np.array(2)])
def test_a_label_is_a_whole_number_of_any_kind(label: Any) -> None:
    assert check_item((GREY, label)).label == 2


def test_patients_become_groups_and_are_none_where_no_item_has_one() -> None:
    split = read_dataset(Listed([(GREY, 0, "p1"), (GREY, 1, 7), (GREY, 1, np.int64(7)), (GREY, 0, "p1")]), run(1))
    assert split.group is not None
    first, second, *others = split.group.tolist()
    assert others == [second, first]
    assert first != second
    assert "p1" not in first, "no patient is named"
    assert split.examples.labels.tolist() == [0, 1, 1, 0]
    assert read_dataset(Listed([(GREY, 0)]), run(1)).group is None


def test_items_are_fitted_as_files_are() -> None:
    large = np.repeat(np.repeat(RGB, 2, 0), 2, 1)
    fitted = read_dataset(Listed([(large, 0)]), run(1, fit="stretch", colours="convert")).examples.pixels()[0, 0]
    assert np.array_equal(
        fitted, np.asarray(Image.fromarray(large).convert("L").resize((4, 4), Image.Resampling.BILINEAR))
    )
    floats = torch.from_numpy(large).permute(2, 0, 1) / 255
    unit = read_dataset(Listed([(floats, 0)]), run(1, fit="stretch", colours="convert")).examples.pixels()[0, 0]
    np.testing.assert_allclose(in_unit(unit.numpy()) * 255, fitted, atol=1)
    spread = read_dataset(Listed([(GREY, 0)]), run(3, colours="convert")).examples.pixels()[0]
    assert np.array_equal(spread, np.stack([GREY] * 3))
    step = {"transform": "torchvision/CenterCrop", "size": 2}
    prepared = read_dataset(Listed([(PLANES, 0), (UNIT, 0)]), run(3, 2, 2, prepare=[step])).examples.pixels()
    torch.testing.assert_close(prepared.float() / 65535, UNIT[None, :, 1:3, 1:3].expand(2, -1, -1, -1))


def test_without_a_run_items_are_fitted_to_the_first_ones_shape() -> None:
    tall = np.zeros((8, 4), np.uint8)
    found = infer_item_input(Listed([(GREY, 0), (tall, 1)]))
    assert (found.shape, found.fit, found.colours) == ((1, 4, 4), "stretch", "convert")
    assert read_dataset(Listed([(GREY, 0), (tall, 1)]), None).examples.images.shape == (2, 1, 4, 4)


def test_bytes_and_floats_together_become_deep() -> None:
    images = read_dataset(Listed([(PLANES, 0), (UNIT, 1), (PLANES, 0)]), run(3)).examples.pixels()
    assert images.dtype == torch.uint16
    torch.testing.assert_close(images.float() / 65535, UNIT.expand(3, -1, -1, -1))


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (GREY, "a ndarray; expected (image, label), or (image, label, patient)"),
        ({"image": GREY}, "a dict; expected"),
        ((GREY,), "a tuple of 1 values; expected"),
        ((GREY, 0, "p", 1), "a tuple of 4 values"),
        (("a.png", 0), "the image is a str; expected a PIL image"),
        ((torch.zeros(4, 4), 0), "Tensor of shape [4, 4]; expected a PIL image (L or RGB), an array"),
        ((torch.zeros(1, 1, 4, 4), 0), "of shape [1, 1, 4, 4]"),
        ((np.zeros((0, 4), np.uint8), 0), "of shape [0, 4]"),
        ((GREY.astype(np.int64), 0), "values of int64; expected uint8, or floats from 0 to 1"),
        ((GREY.astype(np.float32), 0), "values from 0 to 15; expected uint8, or floats from 0 to 1. Scale them"),
        ((np.full((4, 4), np.nan), 0), "values that are no numbers"),
        ((Image.fromarray(GREY).convert("RGBA"), 0), 'mode RGBA; expected L or RGB: image.convert("RGB")'),
        ((GREY, "mel"), "the label is 'mel'; expected a number, or a row of numbers"),
        ((GREY, True), "the label is True"),
        ((GREY, torch.tensor([[1]])), "the label is tensor([[1]])"),
        ((GREY, 0, 1.5), "the patient is a float; expected a text or a whole number"),
        ((RGB, 0), "RGB, and the run accepts grey images only (input.colours)"),
        ((UNIT, 0), "3 channels, and the run's input.shape has 1"),
        ((ramp(5, 4, 1), 0), "4 x 5 pixels, and the run accepts 4 x 4 only (input.fit)"),
        ((GREY, 0, "p"), "has a patient, unlike item 0; expected a patient in each item, or in none"),
        (lambda: dict[str, int]()["key"], "cannot be read: KeyError: 'key'; expected (image, label)"),
    ],
)
def test_what_is_wrong_names_the_item_and_what_was_expected(item: Any, said: str) -> None:
    with pytest.raises(DataError) as error:
        read_dataset(Listed([(GREY, 0), item]), run(1))
    assert str(error.value).startswith("item 1 of the dataset")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (Listed([]), "no items; expected at least one. A set that is not there is None"),
        (Streamed(), "a Streamed without a length; expected one with __len__ and __getitem__, not an IterableDataset"),
    ],
)
def test_a_dataset_that_cannot_be_indexed_or_is_empty_is_refused(dataset: Dataset[Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_dataset(dataset, run(1))


GENERATOR = np.random.default_rng()
RANDOM: list[Callable[[], Any]] = [
    lambda: (torch.rand(1, 4, 4), 0),
    lambda: (np.random.rand(4, 4), 0),
    lambda: (GREY, random.randrange(1000)),  # noqa: S311
    lambda: (GENERATOR.random((4, 4)), 0),
    lambda: (GREY, 0, str(GENERATOR.random())),
]


@pytest.mark.parametrize("item", RANDOM)
def test_a_dataset_that_draws_random_numbers_is_refused(item: Callable[[], Any]) -> None:
    with pytest.raises(DataError, match=r"item 0 of the dataset is another one each time.*plan\.augmentation"):
        read_dataset(Listed([item]), run(1))


MODULE = """
import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

class Scans(Dataset):
    def __init__(self, count, first=0):
        self.count, self.first = count, first
    def __len__(self):
        return self.count
    def __getitem__(self, n):
        return np.full((8, 8), n, np.uint8), n % 2, self.first + n // 2

def alone(data): return Scans(40)
def pair(data): return Scans(40), Scans(10, first=100)
def test_only(data): return None, Scans(10)
def crossing(data): return Scans(40), Scans(10)
def images_alone(data): return TensorDataset(torch.zeros(4, 1, 8, 8))
def three(data): return Scans(4), None, None
def strange(data): return Scans(4), [1]

class Files(Dataset):
    def __init__(self, data):
        self.paths = sorted(data.root.iterdir())
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, n):
        image = np.load(self.paths[n], allow_pickle=False)
        return image, n % 2, f"Doe {n // 2}"

class Stamped(Files):
    def stamp(self, n):
        return str(self.paths[n].stat().st_mtime_ns)

class Unstamped(Files):
    def stamp(self, n):
        return None

def files(data): return Files(data)
def stamped(data): return Stamped(data)
def unstamped(data): return Unstamped(data)
"""
FITTED = run(1, fit="stretch")


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Data]:
    (tmp_path / "scans_outside.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def allowed(name: str) -> Data:
        monkeypatch.setattr(plugins, "_allowed", {f"scans_outside:{name}"})
        return Data.model_validate({"source": f"scans_outside:{name}"})

    return allowed


def test_a_source_is_a_dataset_or_two_of_which_either_may_be_none(outside: Callable[[str], Data]) -> None:
    fitted = run(1, fit="stretch")
    train, test = arrays.read(outside("pair"), fitted, Reading())
    assert train is not None
    assert test is not None
    assert (len(train.examples), len(test.examples)) == (40, 10)
    assert arrays.read(outside("test_only"), fitted, Reading())[0] is None
    alone = load(outside("alone"), fitted)
    assert len(alone.train) + len(alone.test) == 40
    assert alone.group_column is not None
    assert alone.test_group_column is not None
    assert not set(alone.group_column) & set(alone.test_group_column), "a test set is held out by patients"
    with pytest.raises(DataError, match="train and test"):
        load(outside("crossing"), fitted)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("images_alone", "item 0 of the dataset: a tuple of 1 values"),
        ("three", "gave a tuple; expected a torch.utils.data.Dataset, or two"),
        ("strange", "gave a tuple; expected a torch.utils.data.Dataset, or two"),
    ],
)
def test_what_a_source_may_not_be_is_told_by_its_name(name: str, said: str, outside: Callable[[str], Data]) -> None:
    with pytest.raises(DataError, match=f"'scans_outside:{name}'") as error:
        arrays.read(outside(name), run(1, fit="stretch"), Reading())
    assert said in str(error.value)


@pytest.fixture
def scans(tmp_path: Path) -> list[Path]:
    """Files of images 8 x 8: of bytes, and one of floats in 0..1."""
    (tmp_path / "scans").mkdir()
    paths = [tmp_path / "scans" / f"{number:02}.npy" for number in range(40)]
    for number, path in enumerate(paths):
        np.save(path, np.full((8, 8), number, np.uint8) if number != 7 else np.full((8, 8), 0.7, np.float32))
    return paths


def on_disk(data: Data, scans: list[Path], *, noisy: bool = False) -> Source:
    folder = scans[0].parent.parent / "cache"
    reading = Reading(Cache(folder=folder, memory_mb=0, processes=1))
    return load(data.model_copy(update={"root": scans[0].parent}), FITTED, (), reading, noisy=noisy)


def in_memory(data: Data, scans: list[Path], *, noisy: bool = False) -> Source:
    return load(data.model_copy(update={"root": scans[0].parent}), FITTED, noisy=noisy)


def alike(one: Source, other: Source) -> bool:
    assert one.group_column is not None
    assert other.group_column is not None
    return one.group_column.tolist() == other.group_column.tolist() and all(
        torch.equal(mine.pixels().view(torch.int16), theirs.pixels().view(torch.int16))
        and torch.equal(mine.labels, theirs.labels)
        for mine, theirs in ((one.train, other.train), (one.test, other.test))
    )


@pytest.mark.parametrize(("name", "noisy"), [("files", False), ("stamped", True)])
def test_a_dataset_on_the_disk_is_the_one_in_memory_and_what_changes_is_decoded_alone(
    name: str, noisy: bool, outside: Callable[[str], Data], scans: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, numbers = outside(name), list[int]()
    if noisy:
        scans[3].write_bytes(b"Doe")  # it is left out
    here, there = in_memory(data, scans, noisy=noisy), on_disk(data, scans, noisy=noisy)
    assert (here.train.source, here.train.images.dtype) == (None, torch.uint16)
    assert there.train.source is not None
    assert alike(here, there)
    assert b"Doe" not in (there.train.source.path.parent / "index.sqlite").read_bytes()

    def noted(folder: Path, input_: Input, chunks: Any, processes: int) -> Any:
        numbers.extend(picture.number for chunk in chunks for _, picture, _ in chunk)
        return decode_onto(folder, input_, chunks, processes)

    monkeypatch.setattr(image_cache, "decode_onto", noted)
    np.save(scans[12], np.full((8, 8), 200, np.uint8))
    os.utime(scans[12], (1, 1))
    assert alike(in_memory(data, scans, noisy=noisy), on_disk(data, scans, noisy=noisy))
    assert numbers == ([3, 12] if noisy else [12])


def test_an_item_that_cannot_be_used_refuses_the_site_or_is_left_out_as_the_settings_say(
    outside: Callable[[str], Data], scans: list[Path]
) -> None:
    data = outside("files")
    scans[3].write_bytes(b"Doe")
    with pytest.raises(DataError, match=r"item 3 of the dataset cannot be read: .*\. 1 of 40 items cannot"):
        in_memory(data, scans)
    allowing = data.model_copy(update={"max_unreadable_fraction": 0.03})
    for source in (in_memory(data, scans, noisy=True), in_memory(allowing, scans)):
        assert len(source.train) + len(source.test) == 39


def test_a_stamp_that_is_no_text_is_refused(outside: Callable[[str], Data], scans: list[Path]) -> None:
    with pytest.raises(DataError, match=r"stamp\(0\) of the dataset gave None; expected a text that changes"):
        on_disk(outside("unstamped"), scans)
