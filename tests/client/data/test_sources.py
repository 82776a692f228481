"""Sources are read as they are, cut into sites, and refused in one line that says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protofed.client.data.partition import hold_out, pfllib_dirichlet
from protofed.client.data.site import load_site, load_sites, load_test
from protofed.client.data.sources import load
from protofed.common.config.data import Data
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

SHARED = Path(os.environ.get("PROTOFED_DATA", Path(__file__).parents[4] / "shared" / "data"))
DIGITS = Input(shape=(1, 8, 8))
SMALL = Input(shape=(3, 2, 2))
needs_data = pytest.mark.skipif(not (SHARED / "unpack.py").is_file(), reason=f"no real data at {SHARED}")


def settings(source: str, **more: Any) -> Data:
    return Data.model_validate({"source": source, **more})


def half(labels: list[int], start: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images [N, 2, 2, 3] whose first pixel is their number, and labels [N, 1] as in MedMNIST."""
    images = np.zeros((len(labels), 2, 2, 3), dtype=np.uint8)
    images[:, 0, 0, 0] = np.arange(start, start + len(labels))
    return images, np.array(labels, dtype=np.uint8)[:, None]


def write_npz(folder: Path, arrays: dict[str, Any], **more: Any) -> Data:
    np.savez(folder / "set.npz", **arrays)
    return settings("npz", root=folder / "set.npz", **more)


def both(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"train_images": images, "train_labels": labels, "test_images": images, "test_labels": labels}


def two_sites(**more: Any) -> dict[str, Any]:
    train, test = half([0, 1, 0, 1]), half([0, 1, 1], start=4)
    named = {"train_images": train[0], "train_labels": train[1], "test_images": test[0], "test_labels": test[1]}
    return {**named, "train_site": np.array(["b", "a", "b", "b"]), **more}


def numbers(images: torch.Tensor) -> list[int]:
    return images[:, 0, 0, 0].tolist()


def rows(images: torch.Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in images]


def test_digits_hold_out_a_balanced_test_set_by_the_seed() -> None:
    source = load(settings("digits"), DIGITS)
    assert len(source.train) == 1797 - 520
    assert source.test.labels.bincount().tolist() == [52] * 10  # int(0.3 * 174), 174 eights being the fewest
    assert (source.train.pixels().dtype, float(source.train.pixels().max())) == (torch.float32, 1.0)
    again, other = (load(settings("digits", seed=seed), DIGITS).test.pixels() for seed in (0, 1))
    assert (torch.equal(source.test.pixels(), again), torch.equal(source.test.pixels(), other)) == (True, False)


def test_a_spiral_has_an_arm_a_class_and_is_drawn_by_the_seed() -> None:
    plane = Input(shape=(1, 1, 2))
    source = load(settings("spiral"), plane)
    assert source.train.labels.bincount().tolist() == [560] * 6
    assert source.test.labels.bincount().tolist() == [240] * 6
    x, y = (source.train.pixels().reshape(-1, 2).double() - 0.5).T
    radius, angle = torch.hypot(x, y), torch.atan2(y, x)
    assert 0.05 <= float(radius.min()) < float(radius.max()) <= 0.5 + 1e-6
    begins = angle - 0.55 * 2 * torch.pi * (radius - 0.05) / 0.45  # where its arm leaves the middle
    off = torch.remainder(begins - source.train.labels * torch.pi / 3 + torch.pi, 2 * torch.pi) - torch.pi
    assert float(off.std()) == pytest.approx(0.1, rel=0.1)
    assert float(off.abs().mean()) < 0.1
    again, other = (load(settings("spiral", seed=seed), plane).test.pixels() for seed in (0, 1))
    assert (torch.equal(source.test.pixels(), again), torch.equal(source.test.pixels(), other)) == (True, False)
    tailed = load_sites(settings("spiral", long_tail=0.01), plane, 6)[0]
    assert tailed.train.labels.bincount().tolist() == [int(560 * 0.01 ** (c / 5)) for c in range(6)]
    with pytest.raises(DataError, match=r"\[1, 1, 2\].*\[1, 8, 8\]"):
        load(settings("spiral"), DIGITS)


def test_npz_is_read_channels_first(tmp_path: Path) -> None:
    images, labels = half([1, 0])
    images[1, 0, 1] = (7, 8, 9)
    source = load(write_npz(tmp_path, both(images, labels)), SMALL)
    assert source.train.pixels().shape == (2, 3, 2, 2)
    assert source.train.pixels()[1, :, 0, 1].tolist() == [7, 8, 9]
    assert source.test.labels.tolist() == [1, 0]
    assert source.site_column is None
    grey = write_npz(tmp_path, both(np.arange(8, dtype=np.uint8).reshape(2, 2, 2), np.array([0, 1])))
    assert load(grey, Input(shape=(1, 2, 2))).train.pixels().tolist() == [[[[0, 1], [2, 3]]], [[[4, 5], [6, 7]]]]


def test_npz_without_a_test_set_holds_one_out_and_an_evaluator_needs_no_training_examples(tmp_path: Path) -> None:
    images, labels = half([0] * 20 + [1] * 12 + [2] * 3)
    arrays = {"train_images": images, "train_labels": labels, "train_site": np.arange(35)}
    source = load(write_npz(tmp_path, arrays, test_fraction=0.5), SMALL)
    assert source.test.labels.bincount(minlength=3).tolist() == [10, 6, 0]
    assert numbers(source.train.pixels()) == np.asarray(source.site_column).tolist()
    assert numbers(source.test.pixels()) == np.asarray(source.test_site_column).tolist()
    images, labels = half([0, 1, 1])
    data = write_npz(tmp_path, {"test_images": images, "test_labels": labels})
    assert (len(load_test(data, SMALL, 2).train), len(load_test(data, SMALL, 2).test)) == (0, 3)
    with pytest.raises(DataError, match="no training examples"):
        load_sites(data, SMALL, 2)


def test_a_column_makes_one_site_a_value_and_may_split_the_test_set_too(tmp_path: Path) -> None:
    sites = load_sites(write_npz(tmp_path, two_sites(), partition={"kind": "column"}), SMALL, 2)
    assert [numbers(site.train.pixels()) for site in sites] == [[1], [0, 2, 3]]
    assert sites[0].test is sites[1].test
    assert [site.local_test for site in sites] == [None, None]
    both_columns = two_sites(test_site=np.array(["b", "a", "b"]))
    data = write_npz(tmp_path, both_columns, partition={"kind": "column"})
    sites = load_sites(data, SMALL, 2)
    assert [numbers(site.local_test.pixels()) for site in sites if site.local_test is not None] == [[5], [4, 6]]
    assert sites[0].test is sites[1].test
    assert numbers(sites[0].test.pixels()) == numbers(load_test(data, SMALL, 2).test.pixels()) == [4, 5, 6]


@pytest.mark.parametrize("long_tail", [None, 0.5])
def test_patients_are_the_units_of_each_site(long_tail: float | None, tmp_path: Path) -> None:
    arrays = two_sites(train_group=np.array(["Roe", "Doe", "Poe", "Roe"]), test_group=np.array(["x", "y", "z"]))
    data = write_npz(tmp_path, arrays, partition={"kind": "column"}, long_tail=long_tail)
    patients = {0: "Roe", 1: "Doe", 2: "Poe", 3: "Roe"}  # by the image's number
    for site in load_sites(data, SMALL, 2):
        assert site.train.units is not None
        assert site.test.units is not None  # intervals of scores draw whole patients
        assert site.test.units.tolist() == [0, 1, 2]
        own = [patients[number] for number in numbers(site.train.pixels())]
        units = site.train.units.tolist()
        assert sorted(set(units)) == list(range(len(set(own))))
        assert len(set(zip(own, units, strict=True))) == len(set(own))
    ungrouped = load_sites(write_npz(tmp_path, two_sites(), partition={"kind": "column"}), SMALL, 2)
    assert all(site.train.units is None is site.test.units for site in ungrouped)


@pytest.mark.parametrize("seed", range(4))
def test_a_column_follows_its_examples_through_a_long_tail(seed: int, tmp_path: Path) -> None:
    data = write_npz(tmp_path, two_sites(), partition={"kind": "column"}, long_tail=0.5, seed=seed)
    made = [numbers(site.train.pixels()) for site in load_sites(data, SMALL, 2)]
    assert made in ([[1], [0, 2]], [[0, 2, 3]])  # one of the two examples of class 1 is left


def test_the_long_tail_leaves_the_test_set_alone() -> None:
    data = settings("digits", seed=5, long_tail=0.5, partition={"kind": "dirichlet", "sites": 4, "beta": 0.5})
    sites = load_sites(data, DIGITS, 10)
    other = load_sites(data.model_copy(update={"seed": 6}), DIGITS, 10)
    assert len(sites) == len(other) == 4
    assert [len(site.train) for site in sites] != [len(site.train) for site in other]
    sizes = load(data, DIGITS).train.labels.bincount().tolist()
    tail = [min(size, int(max(sizes) * 0.5 ** (c / 9))) for c, size in enumerate(sizes)]
    assert torch.stack([site.train.labels.bincount(minlength=10) for site in sites]).sum(0).tolist() == tail
    assert sites[0].test.labels.bincount().tolist() == [52] * 10


def test_a_share_out_of_range_says_how_many_there_are_and_a_source_that_is_not_cut_is_all_of_any_share() -> None:
    data = settings("digits", partition={"kind": "dirichlet", "sites": 3, "beta": 1.0})
    for share in (-1, 3):
        with pytest.raises(DataError, match=rf"partition_index.*{share}"):
            load_site(data, share, DIGITS, 10)
    own = load_site(settings("digits"), 3, DIGITS, 10)
    assert torch.equal(own.train.pixels(), load_sites(settings("digits"), DIGITS, 10)[0].train.pixels())


def test_images_of_another_shape_and_labels_beyond_the_runs_classes_are_refused() -> None:
    with pytest.raises(DataError, match=r"\[1, 8, 8\].*\[3, 8, 8\]"):
        load(settings("digits"), Input(shape=(3, 8, 8)))
    with pytest.raises(DataError, match=r"labels are 0 to 9, but the run has 7 classes"):
        load_sites(settings("digits"), DIGITS, 7)


@pytest.mark.parametrize("source", ["cifar10", "cifar100", "mnist", "fashion-mnist"])
def test_a_missing_torchvision_set_is_one_line(source: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.download") as caught:
        load(settings(source, root=tmp_path / "nowhere"), DIGITS)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "nowhere").exists()


def test_a_damaged_torchvision_set_is_refused(tmp_path: Path) -> None:
    (raw := tmp_path / "MNIST" / "raw").mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (raw / f"{name}-ubyte").write_bytes(b"\0\0\x08\x03 cut short")
    with pytest.raises(DataError, match="no usable MNIST"):
        load(settings("mnist", root=tmp_path), Input(shape=(1, 28, 28)))


@pytest.mark.parametrize("source", ["npz", "mnist"])
def test_a_source_in_a_file_needs_its_root(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROTOFED_DATA", raising=False)
    with pytest.raises(DataError, match=r"no data\.root"):
        load(settings(source), DIGITS)


@pytest.mark.parametrize("root", ["here.npz", None])
def test_a_relative_root_is_the_environments(root: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path / "sets"))
    with pytest.raises(DataError, match=f"{tmp_path / 'sets' / (root or '')}"):
        load(settings("npz", root=root), DIGITS)
    with pytest.raises(DataError, match=f"{tmp_path / 'other.npz'}"):
        load(settings("npz", root=tmp_path / "other.npz"), DIGITS)


@pytest.mark.parametrize("content", [None, b"", b"no archive", b"PK\x03\x04 half an archive"])
def test_an_unreadable_npz_is_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "set.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"set\.npz.*train_images") as caught:
        load(settings("npz", root=tmp_path / "set.npz"), SMALL)
    assert "allow_pickle" not in str(caught.value)
    assert ("PROTOFED_DATA" in str(caught.value)) is (content is None), "the file may be elsewhere"
    assert "Errno" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train_labels": None}, "only one of train_images and train_labels"),
        (dict.fromkeys(two_sites()), "has neither train_images nor test_images"),
        ({"train_images": np.zeros((4, 2, 2, 3))}, r"set\.npz, train: images are float64"),
        ({"train_images": np.zeros((4, 12), np.uint8)}, r"shape \[4, 12\]; expected uint8 of shape"),
        ({"train_labels": np.zeros(3, np.int64)}, r"labels are int64 of shape \[3\].*each of 4 images"),
        ({"train_labels": np.zeros((4, 2), np.int64)}, r"labels are int64 of shape \[4, 2\]"),
        ({"train_labels": np.zeros(4)}, "expected whole numbers"),
        ({"train_labels": np.array([0, 1, -1, 0])}, "labels are -1 to 1"),
        ({"train_labels": np.array([0, 1, {}, 0], dtype=object)}, "cannot read .*Object arrays"),
        ({"train_site": np.array(["a"])}, r"train_site has shape \[1\]"),
        ({"train_site": None}, "needs a source that names the sites. Expected an .npz with train_site"),
        ({"test_site": np.array(["a", "a", "a"])}, "site b trains, and has no examples in the test set"),
    ],
)
def test_a_wrong_npz_says_what_was_expected(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    arrays = {key: value for key, value in two_sites(**change).items() if value is not None}
    data = write_npz(tmp_path, arrays, partition={"kind": "column"})
    with pytest.raises(DataError, match=said):
        load_sites(data, SMALL, 2)


PFLLIB = {"merge_test_into_train": True, "local_test_fraction": 0.25}


def test_a_merged_source_has_all_examples_and_needs_both_columns(tmp_path: Path) -> None:
    source = load(write_npz(tmp_path, two_sites(test_site=np.array(["a", "c", "b"])), **PFLLIB), SMALL)
    assert (numbers(source.train.pixels()), source.train.labels.tolist()) == ([*range(7)], [0, 1, 0, 1, 0, 1, 1])
    assert np.asarray(source.site_column).tolist() == ["b", "a", "b", "b", "a", "c", "b"]
    assert source.test.pixels().shape == (0, 3, 2, 2)
    digits = load(settings("digits", **PFLLIB), DIGITS)
    assert (len(digits.train), len(digits.test)) == (1797, 0)
    data = write_npz(tmp_path, two_sites(), partition={"kind": "column"}, **PFLLIB)
    with pytest.raises(DataError, match=r"train_site.*data\.merge_test_into_train.*test_site"):
        load_sites(data, SMALL, 2)


def test_merged_sites_are_pfllibs_and_only_they_have_test_sets() -> None:
    data = settings("digits", seed=1, partition={"kind": "pfllib-dirichlet", "sites": 5, "beta": 0.5}, **PFLLIB)
    sites = load_sites(data, DIGITS, 10)
    labels, rng = load(data, DIGITS).train.labels.numpy(), np.random.RandomState(1)
    train, test = hold_out(pfllib_dirichlet(labels, 5, 0.5, rng), 0.25, rng)  # one generator, as in the release
    for site, kept, held in zip(sites, train, test, strict=True):
        assert len(site.test) == 0
        assert site.local_test is not None
        assert site.train.labels.tolist() == labels[kept].tolist()
        assert site.local_test.labels.tolist() == labels[held].tolist()


@pytest.mark.parametrize(
    "partition",
    [
        {"kind": "pfllib-dirichlet", "sites": 5, "beta": 0.5},
        {"kind": "pathological", "sites": 5, "classes_each": 2},
        {"kind": "shards", "sites": 5, "shards": 2},
        {"kind": "whole"},
    ],
)
def test_a_merged_sources_evaluator_scores_on_all_local_test_sets(partition: dict[str, Any]) -> None:
    data = settings("digits", seed=1, partition=partition, **PFLLIB)
    sites, evaluator = load_sites(data, DIGITS, 10), load_test(data, DIGITS, 10)
    everything = [site.local_test.pixels() for site in sites if site.local_test is not None]
    assert len(everything) == len(sites)
    assert sorted(rows(torch.cat(everything))) == sorted(rows(evaluator.test.pixels()))
    assert sum(len(site.train) for site in sites) + len(evaluator.test) == 1797
    assert (len(evaluator.train), evaluator.scores_only) == (0, True)


@pytest.mark.parametrize(
    "more",
    [
        {"partition": {"kind": "pfllib-dirichlet", "sites": 4, "beta": 0.5}, **PFLLIB},
        {"partition": {"kind": "pathological", "sites": 10, "classes_each": 2, "balanced": True}, **PFLLIB},
        {"partition": {"kind": "niid-bench-dirichlet", "sites": 4, "beta": 0.5}, "local_test_fraction": 0.2},
        {"partition": {"kind": "dirichlet", "sites": 4, "beta": 0.5}, "local_test": "by-class", "long_tail": 0.5},
        {"partition": {"kind": "dirichlet", "sites": 4, "beta": 0.5}, "long_tail": 0.5},
        {"partition": {"kind": "creff-dirichlet", "sites": 12, "beta": 0.4}, "local_test": "by-class"},
        {"partition": {"kind": "shards", "sites": 5, "shards": 4}, "local_test": "by-class"},
    ],
    ids=lambda more: str(more["partition"]["kind"]),
)
def test_a_daemon_gets_the_same_test_sets_as_a_simulation(more: dict[str, Any]) -> None:
    data = settings("digits", seed=5, **more)
    for share, site in enumerate(load_sites(data, DIGITS, 10)):
        own = load_site(data, share, DIGITS, 10)
        assert (own.local_test is None) == (site.local_test is None) == (len(more) == 2 and "long_tail" in more)
        for one, other in ((own.train, site.train), (own.test, site.test), (own.local_test, site.local_test)):
            if one is not None and other is not None:
                assert torch.equal(one.pixels(), other.pixels())
                assert torch.equal(one.labels, other.labels)


def test_a_local_test_share_comes_out_of_what_a_site_would_train_on() -> None:
    data = settings("digits", partition={"kind": "dirichlet", "sites": 4, "beta": 0.5})
    whole = load_sites(data, DIGITS, 10)
    split = load_sites(data.model_copy(update={"local_test_fraction": 0.25}), DIGITS, 10)
    for before, after in zip(whole, split, strict=True):
        assert before.local_test is None
        assert after.local_test is not None
        assert len(after.local_test) == -(-len(before.train) // 4)
        both = [*rows(after.train.pixels()), *rows(after.local_test.pixels())]
        assert sorted(both) == sorted(rows(before.train.pixels()))
        assert torch.equal(after.test.pixels(), before.test.pixels())
    assert len(load_test(data, DIGITS, 10).test) == len(split[0].test) == 520


def test_by_class_divides_the_test_set_among_the_sites_that_hold_its_classes() -> None:
    data = settings("digits", partition={"kind": "shards", "sites": 5, "shards": 2}, local_test="by-class")
    sites = load_sites(data, DIGITS, 10)
    assert len({id(site.test) for site in sites}) == 1
    assert len(sites[0].test) == 520  # nothing is taken away from it
    local = [site.local_test for site in sites if site.local_test is not None]
    assert [set(test.labels.tolist()) for test in local] == [set(site.train.labels.tolist()) for site in sites]
    assert sorted(rows(torch.cat([test.pixels() for test in local]))) == sorted(rows(sites[0].test.pixels()))


def test_too_few_examples_or_a_test_share_beside_a_test_set_are_refused(tmp_path: Path) -> None:
    data = write_npz(tmp_path, two_sites(), test_fraction=0.2)
    with pytest.raises(DataError, match=r"data\.test_fraction"):
        load(data, SMALL)
    images, labels = half([0] * 9 + [1])
    data = write_npz(tmp_path, {"train_images": images, "train_labels": labels})
    with pytest.raises(DataError, match="no test set can be held out"):
        load(data, SMALL)
    merged = data.model_copy(update=PFLLIB)
    for read in (load_sites, load_test):
        with pytest.raises(DataError, match="test"):
            read(merged, SMALL, 2)
    assert len(load_test(data.model_copy(update={"test_fraction": 1.0}), SMALL, 2).test) == 10


def test_classes_that_a_test_set_lacks_are_named_and_a_site_that_can_spare_none_trains_without(tmp_path: Path) -> None:
    data = settings("digits", test_fraction=1.0, local_test_fraction=0.25)  # nine of each digit are left at most
    (site,) = load_sites(data, DIGITS, 10)
    assert site.local_test is None
    assert site.unscored(None) == sorted(set(site.train.labels.tolist()))
    assert site.unscored(site.test) == []
    images, labels = half([0] * 20 + [2] * 9)
    data = write_npz(tmp_path, {"train_images": images, "train_labels": labels})
    (site,) = load_sites(data, SMALL, 4)
    assert site.unscored(site.test) == [2]
    evaluator = load_test(data, SMALL, 4)
    assert evaluator.unscored(evaluator.test) == [1, 2, 3]


def test_own_images_give_one_test_set_beside_a_local_fraction(tmp_path: Path) -> None:
    images, labels = half([0] * 40 + [1] * 20)
    arrays, fraction = {"train_images": images, "train_labels": labels}, {"local_test_fraction": 0.25}
    data = write_npz(tmp_path, arrays, **fraction)
    (site,), evaluator = load_sites(data, SMALL, 2), load_test(data, SMALL, 2)
    assert site.local_test is not None
    assert (len(site.train), len(site.test), len(site.local_test)) == (45, 0, 15)
    assert numbers(evaluator.test.pixels()) == numbers(site.local_test.pixels())
    (two,) = load_sites(data.model_copy(update={"test_fraction": 0.3}), SMALL, 2)
    assert two.local_test is not None
    assert (len(two.train), len(two.test), len(two.local_test)) == (30, 18, 12)
    (public,) = load_sites(settings("digits", **fraction), DIGITS, 10)
    assert len(public.test) == 520


def unpack(verb: str, archive: str, target: Path) -> None:
    subprocess.run([sys.executable, SHARED / "unpack.py", verb, SHARED / archive, target], check=True)


@needs_data
def test_mnist_is_read_from_its_own_files(tmp_path: Path) -> None:
    unpack("to_torchvision", "mnist.zip", tmp_path)
    source = load(settings("mnist", root=tmp_path), Input(shape=(1, 28, 28)))
    assert source.train.pixels().shape == (60000, 1, 28, 28)
    assert source.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert source.test.labels[:5].tolist() == [7, 2, 1, 0, 4]


@needs_data
def test_cifar10_with_a_long_tail_has_the_papers_size(tmp_path: Path) -> None:
    unpack("to_torchvision", "cifar10.zip", tmp_path)
    data = settings("cifar10", root=tmp_path, long_tail=0.1, partition={"kind": "dirichlet", "sites": 20, "beta": 0.5})
    sites = load_sites(data, Input(shape=(3, 32, 32)), 10)
    assert len(sites) == 20
    assert sum(len(site.train) for site in sites) == 20431  # METHODS 2.5
    assert sites[0].test.labels.bincount().tolist() == [1000] * 10


@needs_data
@pytest.mark.parametrize(
    ("name", "channels", "classes", "sizes"), [("retinamnist", 3, 5, (1080, 400)), ("breastmnist", 1, 2, (546, 156))]
)
def test_medmnists_files_are_read(name: str, channels: int, classes: int, sizes: tuple[int, int]) -> None:
    (site,) = load_sites(settings("npz", root=SHARED / f"{name}.npz"), Input(shape=(channels, 28, 28)), classes)
    assert (len(site.train), len(site.test)) == sizes  # val_* is left alone


@needs_data
def test_ham10000_is_cut_by_its_real_sites(tmp_path: Path) -> None:
    unpack("to_npz", "ham10000_sites_28.zip", tmp_path / "ham.npz")
    data = settings("npz", root=tmp_path / "ham.npz", partition={"kind": "column"})
    sites = load_sites(data, Input(shape=(3, 28, 28)), 7)
    assert [len(site.train) for site in sites] == [1572, 2348, 2764, 304]
    assert [len(site.local_test or ()) for site in sites] == [459, 679, 796, 94]
    assert {len(site.test) for site in sites} == {2028}
