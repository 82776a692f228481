"""The shape of a source whose run is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.image_files import ramp, save, settings

from protofed.client.data.sources import infer_class_names, infer_input, load
from protofed.common.config.data import Data
from protofed.common.errors import DataError


@pytest.mark.parametrize(
    ("halves", "shape", "classes"),
    [
        ({"train": (9, 4, 5), "test": (3, 4, 5)}, (1, 4, 5), 7),
        ({"test": (3, 4, 5, 3)}, (3, 4, 5), 7),
        ({"train": (20, 2, 2)}, (1, 2, 2), 7),
    ],
)
def test_it_is_theirs(halves: dict[str, tuple[int, ...]], shape: tuple[int, ...], classes: int, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {}
    for half, of in halves.items():
        arrays |= {f"{half}_images": np.zeros(of, np.uint8), f"{half}_labels": np.full(of[0], classes - 1)}
    np.savez(tmp_path / "a.npz", **arrays)
    found, count = infer_input(Data(source="npz", root=tmp_path / "a.npz"))
    assert (found.shape, count) == (shape, classes)


def test_there_are_always_two_classes_and_numbers_have_no_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", test_images=np.zeros((2, 3, 3), np.uint8), test_labels=np.zeros(2, np.int64))
    assert infer_input(Data(source="npz", root=tmp_path / "a.npz"))[1] == 2
    assert infer_class_names(Data(source="digits")) == ()
    with pytest.raises(DataError, match="there is no file"):
        infer_input(Data(source="npz", root=tmp_path / "none.npz"))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").write_bytes(b"damaged")
    with pytest.raises(DataError, match="none of the first 1 files is an image"):
        infer_input(settings("folder", tmp_path))


def test_of_files_it_is_the_first_readable_ones_and_the_names_are_their_own(tmp_path: Path) -> None:
    (tmp_path / "A").mkdir()
    (tmp_path / "A" / "0.png").write_bytes(b"damaged")
    for name in map(str, range(1, 21)):
        save(tmp_path / "A" / f"{name}.png", ramp(5, 7))
        save(tmp_path / "Melanoma" / f"{name}.png", ramp(9, 9, 1))
    save(tmp_path / "unsure" / "3.png")
    more = {
        "label_map": {"Melanoma": "mel"},
        "ignore_labels": ["unsure"],
        "max_unreadable_fraction": 0.5,
        "test_fraction": 0.5,
    }
    data = settings("folder", tmp_path, **more)
    found, count = infer_input(data)
    assert (found.shape, found.fit, found.colours, count) == ((3, 5, 7), "stretch", "convert", 2)
    assert infer_class_names(data) == ("A", "mel")
    assert load(data, found, infer_class_names(data)).train.pixels().shape[1:] == (3, 5, 7)


def test_photographs_are_shrunk(tmp_path: Path) -> None:
    save(tmp_path / "A" / "0.png", ramp(2100, 3000))  # more values than a run's images may have
    found, _ = infer_input(settings("folder", tmp_path))
    assert found.shape == (3, 717, 1024)
    save(tmp_path / "A" / "0.png", ramp(1, 5000))
    assert infer_input(settings("folder", tmp_path))[0].shape == (3, 1, 1024)


@pytest.mark.parametrize("shape", [(2, 0, 3), (2, 4097, 4097)])
def test_arrays_that_no_run_can_use_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", test_images=np.zeros(shape, np.uint8), test_labels=np.zeros(2, np.int64))
    with pytest.raises(DataError, match="Expected at least one pixel"):
        infer_input(Data(source="npz", root=tmp_path / "a.npz"))
