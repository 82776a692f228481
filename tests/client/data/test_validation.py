"""A validation part is drawn out of the training images, and nothing of a run then reads the test set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.image_files import RGB, settings, shade

from protofed.client.data.site import load_site, load_sites, load_test
from protofed.client.data.sources import load
from protofed.common.config.data import Data
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

DIGITS = Input(shape=(1, 8, 8))
PARTITION = {"kind": "dirichlet", "sites": 5, "beta": 0.3}


def digits(**more: Any) -> Data:
    return Data.model_validate({"source": "digits", "test_fraction": 0.3, **more})


def found(images: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_a_validation_part_of_the_digits_is_balanced_and_has_no_image_of_the_test_set() -> None:
    tested, tuned = (load(digits(validation_fraction=fraction), DIGITS) for fraction in (None, 0.2))
    assert tuned.test.labels.bincount().tolist() == [24] * 10  # int(0.2 * 122), 122 eights being the fewest
    assert len(tuned.train) + len(tuned.test) == len(tested.train) == 1277
    assert found(tuned.train.pixels()) | found(tuned.test.pixels()) == found(tested.train.pixels())
    assert not found(tuned.test.pixels()) & (found(tuned.train.pixels()) | found(tested.test.pixels()))
    parts = [load(digits(validation_fraction=0.2, seed=seed), DIGITS).test.pixels() for seed in (0, 0, 1)]
    assert (torch.equal(parts[0], parts[1]), torch.equal(parts[0], parts[2])) == (True, False)


def test_all_of_a_run_score_on_it_and_the_long_tail_is_of_the_rest() -> None:
    data = digits(validation_fraction=0.2, long_tail=0.02, partition=PARTITION)
    sites, evaluator = load_sites(data, DIGITS, 10), load_test(data, DIGITS, 10)
    for index, site in enumerate(sites):
        assert torch.equal(site.test.pixels(), evaluator.test.pixels())
        assert torch.equal(load_site(data, index, DIGITS, 10).train.pixels(), site.train.pixels())
        assert not found(site.train.pixels()) & found(evaluator.test.pixels())
    sizes = torch.stack([site.train.labels.bincount(minlength=10) for site in sites]).sum(0).tolist()
    assert (len(evaluator.test), sizes) == (240, [102, 69, 44, 29, 18, 12, 7, 5, 3, 2])


def npz(folder: Path, train: int, test: int, columns: tuple[str, ...] = (), **more: Any) -> Data:
    arrays: dict[str, Any] = {}
    for half, first, count in (("train", 0, train), ("test", 100, test)):
        if count:
            arrays[f"{half}_images"] = np.stack([shade(first + number) for number in range(count)])
            arrays[f"{half}_labels"] = np.arange(count) % 2
            known = {
                "site": np.array(["a", "b"])[np.arange(count) // 2 % 2],
                "group": np.array([f"{half}-{number // 4}" for number in range(count)]),
            }
            arrays |= {f"{half}_{column}": known[column] for column in columns}
    np.savez(folder / "a.npz", **arrays)
    return settings("npz", folder / "a.npz", **more)


def test_a_source_with_a_test_set_keeps_groups_whole_and_sites_of_a_column_apart(tmp_path: Path) -> None:
    source = load(npz(tmp_path, 80, 8, ("group",), validation_fraction=0.25), RGB)
    assert source.group_column is not None
    assert source.test_group_column is not None
    assert (len(source.train), len(source.test)) == (60, 20)
    assert not set(source.group_column) & set(source.test_group_column)
    assert not [group for group in source.test_group_column if group.startswith("test")]
    data = npz(tmp_path, 80, 8, ("site",), validation_fraction=0.25, partition={"kind": "column"})
    sites = load_sites(data, RGB, 2)
    own = [len(site.local_test.pixels()) for site in sites if site.local_test is not None]
    assert (len(own), sum(own), len(sites[0].test)) == (2, 20, 20)


@pytest.mark.parametrize("sizes", [(9, 4), (0, 4)], ids=["too few to spare", "none to train on"])
def test_without_images_to_spare_there_is_none(sizes: tuple[int, int], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no test set can be held out"):
        load(npz(tmp_path, *sizes, validation_fraction=0.25), RGB)
    with pytest.raises(DataError, match=r"data\.validation_fraction = 0\.001 leaves no test set"):
        load(digits(validation_fraction=0.001), DIGITS)
