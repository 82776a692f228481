"""The shape of a source whose run is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofed.client.data.sources import own_input
from protofed.common.errors import DataError
from protofed.common.recipe import Data


@pytest.mark.parametrize(
    ("halves", "shape", "classes"),
    [
        ({"train": (9, 4, 5), "test": (3, 4, 5)}, (1, 4, 5), 7),
        ({"test": (3, 4, 5, 3)}, (3, 4, 5), 7),
        ({"train": (20, 2, 2)}, (1, 2, 2), 7),
    ],
)
def test_it_is_the_images_own(
    halves: dict[str, tuple[int, ...]], shape: tuple[int, ...], classes: int, tmp_path: Path
) -> None:
    arrays: dict[str, Any] = {}
    for half, of in halves.items():
        arrays |= {f"{half}_images": np.zeros(of, np.uint8), f"{half}_labels": np.full(of[0], classes - 1)}
    np.savez(tmp_path / "a.npz", **arrays)
    found, count = own_input(Data(source="npz", root=tmp_path / "a.npz"))
    assert (found.shape, count) == (shape, classes)


def test_there_are_always_two_classes(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", test_images=np.zeros((2, 3, 3), np.uint8), test_labels=np.zeros(2, np.int64))
    assert own_input(Data(source="npz", root=tmp_path / "a.npz"))[1] == 2
    with pytest.raises(DataError, match="cannot read"):
        own_input(Data(source="npz", root=tmp_path / "none.npz"))
