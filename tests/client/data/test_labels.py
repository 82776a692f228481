"""Sources with numbers for labels: what the map, groups and MedMNIST's library make of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.support.image_files import RGB, settings, shade

from protofed.client.data.labels import LabelMap, by_number
from protofed.client.data.site import load_sites
from protofed.client.data.sources import load
from protofed.client.tasks.classification import CLASSES
from protofed.common.config.data import Data
from protofed.common.errors import DataError

NUMBERS = np.array([0, 1, 2, 1])


def mapped(class_names: tuple[str, ...] = (), **more: Any) -> tuple[list[int], list[int]]:
    rows, classes = by_number(
        NUMBERS, CLASSES, Data.model_validate({"source": "npz", **more}), class_names, len(class_names) or 3
    )
    return rows.tolist(), classes.tolist()


def test_a_map_is_the_right_way_round_and_numbers_are_classes() -> None:
    run = ("mel", "nv")
    with pytest.raises(DataError, match=r'wrong way round: .*write "Melanoma" = "mel"$'):
        LabelMap.of(Data.model_validate({"source": "folder", "label_map": {"mel": "Melanoma", "nv": "Naevus"}}), run)
    with pytest.raises(DataError, match=r"the run does not have: 'Melanoma'"):
        LabelMap.of(Data.model_validate({"source": "folder", "label_map": {"M": "Melanoma", "nv": "Naevus"}}), run)
    assert mapped() == mapped(("a", "b", "c")) == ([0, 1, 2, 3], [0, 1, 2, 1])
    assert mapped(ignore_labels=["1"]) == mapped(("a", "b", "c"), ignore_labels=["1"]) == ([0, 2], [0, 2])
    assert mapped(label_map={"2": "0"}) == ([0, 1, 2, 3], [0, 1, 0, 1])
    assert mapped(label_map={"2": "0", "0": "2"}, ignore_labels=["1"]) == ([0, 2], [2, 0])
    assert mapped(("a", "b"), label_map={"0": "b", "2": "a"}, ignore_labels=["1"]) == ([0, 2], [1, 0])
    with pytest.raises(DataError, match=r"data\.label_map"):
        mapped(("a", "b"), label_map={"0": "b"})
    with pytest.raises(DataError, match=r"data\.label_map.*class_names"):
        mapped(label_map={"0": "b"})


def test_with_noise_the_images_of_unknown_labels_are_left_out_and_counted() -> None:
    data = Data.model_validate({"source": "npz", "label_map": {"0": "b"}, "ignore_labels": ["2"]})
    with capture_logs() as logs:
        rows, classes = by_number(NUMBERS, CLASSES, data, ("a", "b"), 2, noisy=True)
    assert (rows.tolist(), classes.tolist()) == ([0], [1])
    assert [line["count"] for line in logs] == [2]


def npz(path: Path, groups: dict[str, list[str]], counts: tuple[int, int] = (6, 4), **more: Any) -> Data:
    arrays: dict[str, Any] = {}
    for half, count in zip(("train", "test"), counts, strict=True):
        if count:
            arrays[f"{half}_images"] = np.stack([shade(number) for number in range(count)])
            arrays[f"{half}_labels"] = np.arange(count) % 2
    arrays |= {key: np.array(values) for key, values in groups.items()}
    np.savez(path / "a.npz", **arrays)
    return settings("npz", path / "a.npz", **more)


def test_what_is_ignored_is_left_out_before_anything_is_held_out(tmp_path: Path) -> None:
    data = npz(
        tmp_path,
        {"train_group": list("aabbccdd" * 5)},
        (40, 0),
        ignore_labels=["1"],
        label_map={"0": "1"},
        test_fraction=0.5,
    )
    source = load(data, RGB)
    assert (source.train.labels.tolist(), source.test.labels.tolist()) == ([1] * 10, [1] * 10)
    assert source.group_column is not None
    assert source.test_group_column is not None
    assert {*source.group_column, *source.test_group_column} == set("abcd")


def test_groups_of_an_npz_stay_on_one_side(tmp_path: Path) -> None:
    apart = {"train_group": list("aabbcc"), "test_group": list("ddee")}
    assert np.asarray(load(npz(tmp_path, apart), RGB).test_group_column).tolist() == list("ddee")
    with pytest.raises(DataError, match="2 groups are in more than one of train and test"):
        load(npz(tmp_path, {**apart, "test_group": list("cbdd")}), RGB)
    for only in apart:
        with pytest.raises(DataError, match="only one of train and test has groups"):
            load(npz(tmp_path, {only: apart[only]}), RGB)
    with pytest.raises(DataError, match="test_group"):
        load(npz(tmp_path, {**apart, "test_group": ["a"]}), RGB)


def test_merged_groups_are_held_out_whole_and_a_column_may_not_divide_one(tmp_path: Path) -> None:
    both = {"train_group": list("aabbcc" * 6), "test_group": list("ccdd")}
    (site,) = load_sites(npz(tmp_path, both, (36, 4), merge_test_into_train=True, local_test_fraction=0.4), RGB, 2)
    assert site.local_test is not None
    assert (len(site.train) + len(site.local_test), len(site.local_test)) == (40, 16)  # two of four patients
    with pytest.raises(DataError, match="only one of train and test has groups"):
        load(npz(tmp_path, {"train_group": list("aabbcc")}, merge_test_into_train=True, local_test_fraction=0.4), RGB)
    groups = {"train_group": list("aabbcc"), "test_group": list("ddee"), "train_site": list("xxxxyy")}
    sites = load_sites(npz(tmp_path, groups, partition={"kind": "column"}), RGB, 2)
    assert [len(site.train) for site in sites] == [4, 2]
    with pytest.raises(DataError, match="1 groups are in more than one of the sites"):
        load_sites(npz(tmp_path, {**groups, "train_site": list("xxxyyy")}, partition={"kind": "column"}), RGB, 2)


def test_a_long_tail_keeps_examples_and_their_groups_together(tmp_path: Path) -> None:
    data = npz(tmp_path, {"train_group": list("abcdef" * 6)}, (36, 0), long_tail=0.5, test_fraction=0.4)
    (site,) = load_sites(data, RGB, 2)
    assert len(site.train) == 18  # of two classes with twelve examples each, the second keeps six


def medmnist(folder: Path, name: str, dataset: str | None = None, **more: Any) -> Data:
    halves: dict[str, Any] = {
        f"{half}_images": np.stack([shade(n) for n in range(4)]) for half in ("train", "val", "test")
    }
    labels: dict[str, Any] = {f"{half}_labels": np.array([[0], [1], [2], [2]]) for half in ("train", "val", "test")}
    np.savez(folder / f"{name}.npz", **halves, **labels)
    return settings("medmnist", folder, dataset=dataset or name, **more)


@pytest.mark.parametrize("name", ["dermamnist", "dermamnist_64"])
def test_medmnist_is_read_by_its_library(name: str, tmp_path: Path) -> None:
    source = load(medmnist(tmp_path, name), RGB)
    assert source.train.labels.tolist() == source.test.labels.tolist() == [0, 1, 2, 2]
    assert source.train.pixels()[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    named = load(medmnist(tmp_path, name, label_map={"0": "nv", "1": "mel"}, ignore_labels=["2"]), RGB, ("mel", "nv"))
    assert named.train.labels.tolist() == [1, 0]


def test_a_medmnist_that_cannot_be_had_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"data\.dataset.*'dermanist'.*'dermamnist'"):
        load(medmnist(tmp_path, "dermamnist", "dermanist"), RGB)
    for name in ("organmnist3d", "dermamnist_65"):
        with pytest.raises(DataError, match=r"data\.dataset"):
            load(medmnist(tmp_path, "dermamnist", name), RGB)
    with pytest.raises(DataError, match=r"bloodmnist\.npz.*data\.download.*data\.root") as said:
        load(medmnist(tmp_path, "dermamnist", "bloodmnist"), RGB)
    assert "\n" not in str(said.value)
    monkeypatch.setitem(sys.modules, "medmnist", None)
    with pytest.raises(DataError, match=r"\.whl\[medmnist\]'"):
        load(medmnist(tmp_path, "dermamnist"), RGB)
