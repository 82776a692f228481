"""In a run with noise one file, row or patient more changes what is trained on by that one alone, whatever it is.

Groups that are in two parts are refused by their number, never by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.support.image_files import GREY, RGB, save, settings

from protofed.client.data.examples import Examples
from protofed.client.data.file_entry import TooManyUnreadableError
from protofed.client.data.hold_out import check_apart, held_out, units_of_groups
from protofed.client.data.labels import LabelsError
from protofed.client.data.site import load_site, load_sites, load_test
from protofed.client.data.site_data import SiteData
from protofed.client.data.split import DataSplit
from protofed.common.config.data import Data
from protofed.common.errors import DataError

NAMES = ("mel", "nv")
Added: TypeAlias = "Callable[[Path], object]"
HELD_OUT: list[dict[str, Any]] = [{"test_fraction": 0.3, "local_test_fraction": 0.25}, {"validation_fraction": 0.2}, {}]


def noise(seed: int, kind: type[np.generic] = np.uint8) -> NDArray[Any]:
    """Grey pixels [4, 4]."""
    return np.random.default_rng(seed).integers(0, 256, (4, 4)).astype(kind)


def put(path: Path, content: NDArray[Any] | bytes) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        Image.fromarray(content).save(path, format="PNG")


def folder(root: Path, *, first: str = "") -> Path:
    """40 images of patients with two images each, in two classes."""
    for number in range(40):
        put(root / first / NAMES[number % 2] / f"P{number // 4:02}_{number}.png", noise(number))
    return root


def loaded(root: Path, **more: Any) -> SiteData:
    return load_site(settings("folder", root, **more), 0, GREY, 2, NAMES, noisy=True)


def rows(data: SiteData) -> set[tuple[bytes, int]]:
    pixels = data.train.normalised(data.input).numpy().round(4)
    return {(image.tobytes(), label) for image, label in zip(pixels, data.train.labels.tolist(), strict=True)}


def file_of(name: str, content: NDArray[Any] | bytes) -> Added:
    return lambda root: put(root / name, content)


# What one file more may be: all that had a run refused is among it, or moved other files.
ONE_MORE: dict[str, tuple[Added, bool]] = {
    "an image": (file_of("mel/P90_1.png", noise(900)), True),
    "an image of another patient's bytes": (file_of("mel/P90_1.png", noise(0)), False),
    "an unreadable file": (file_of("mel/P90_1.png", b"no image"), False),
    "an empty file": (file_of("mel/P90_1.png", b""), False),
    "a file in no class's folder": (file_of("P90_1.png", noise(900)), False),
    "a label that is no class": (file_of("cyst/P90_1.png", noise(900)), False),
    "a deleted file": (file_of("mel/#recycle/P90_1.png", noise(900)), False),
    "a file that is no image by its name": (file_of("mel/P90_1.txt", b"about"), False),
    "a pipe": (lambda root: os.mkfifo(root / "mel" / "P90_1.png"), False),
    "an image of 16 bits": (file_of("mel/P90_1.png", noise(900, np.uint16)), True),
}


@pytest.mark.parametrize("held_out", HELD_OUT, ids=str)
@pytest.mark.parametrize("kind", ONE_MORE)
def test_a_file_more_changes_the_training_by_itself(kind: str, held_out: dict[str, Any], tmp_path: Path) -> None:
    before = rows(loaded(folder(tmp_path), **held_out))
    add, _ = ONE_MORE[kind]
    add(tmp_path)
    after = rows(loaded(tmp_path, **held_out))
    assert before <= after
    assert len(after - before) <= 1


@pytest.mark.parametrize("kind", ONE_MORE)
def test_what_is_held_out_is_about_the_share_and_the_file_itself_may_count(kind: str, tmp_path: Path) -> None:
    add, counts = ONE_MORE[kind]
    add(folder(tmp_path))
    # By ever other keys: at some the added image is trained on.
    found = [loaded(tmp_path, local_test_fraction=0.25, seed=seed) for seed in range(20)]
    held = [len(data.local_test) for data in found if data.local_test is not None]
    assert len(set().union(*map(rows, found))) == 40 + counts
    assert 0.18 < sum(held) / 20 / 40 < 0.32


PATTERN = "(P[0-9]+)_"


@pytest.mark.parametrize("held_out", HELD_OUT, ids=str)
@pytest.mark.parametrize(
    "names",
    [
        ("mel/P91_1.png", "mel/P91_2.png", "nv/P91_3.png"),
        ("mel/X91_1.png",),  # of no patient: left out
        ("mel/P91_1.png", "cyst/P91_2.png", "P91_3.png"),
    ],
)
def test_a_patient_more_changes_the_training_set_by_that_patient_at_most(
    names: Sequence[str], held_out: dict[str, Any], tmp_path: Path
) -> None:
    before = loaded(folder(tmp_path), group_pattern=PATTERN, **held_out)
    for seed, name in enumerate(names):
        put(tmp_path / name, noise(910 + seed))
    after = loaded(tmp_path, group_pattern=PATTERN, **held_out)
    assert rows(before) <= rows(after)
    assert before.train.units is not None
    assert after.train.units is not None
    assert int(after.train.units.max()) - int(before.train.units.max()) <= 1


def test_all_images_of_a_patient_are_on_one_side(tmp_path: Path) -> None:
    data = loaded(folder(tmp_path), group_pattern=PATTERN, local_test_fraction=0.5)
    assert data.local_test is not None
    sizes = {len(data.train), len(data.local_test)}
    assert all(size % 4 == 0 and size for size in sizes)


def test_a_patient_in_both_of_the_files_own_splits_is_left_out(tmp_path: Path) -> None:
    folder(tmp_path, first="train")
    put(tmp_path / "test/mel/P80_1.png", noise(800))
    before = loaded(tmp_path, group_pattern=PATTERN)
    put(tmp_path / "test/mel/P03_9.png", noise(801))
    after = loaded(tmp_path, group_pattern=PATTERN)
    assert rows(after) < rows(before)
    assert len(before.train) - len(after.train) == 4  # that patient's, and no other's


def test_a_first_test_image_has_no_training_image_moved(tmp_path: Path) -> None:
    folder(tmp_path, first="train")
    before = loaded(tmp_path)
    put(tmp_path / "test/mel/P80_1.png", noise(800))
    assert rows(before) == rows(loaded(tmp_path))
    assert len(before.train) == 40
    assert before.own_test


@pytest.mark.parametrize("row", ["m90.png,mel,P90", "m90.png,cyst,P90", "none.png,mel,P90", "m90.png,mel,P3"])
def test_a_row_of_a_manifest_more_changes_the_training_set_by_that_patient_at_most(row: str, tmp_path: Path) -> None:
    lines = ["path,label,group"]
    for number in range(40):
        put(tmp_path / f"m{number}.png", noise(number))
        lines.append(f"m{number}.png,{NAMES[number % 2]},P{number // 4}")
    put(tmp_path / "m90.png", noise(900))
    found = []
    for listed in (lines, [*lines, row]):
        (tmp_path / "all.csv").write_text("\n".join(listed), encoding="utf-8")
        data = settings("manifest", tmp_path / "all.csv", local_test_fraction=0.25)
        found.append(load_site(data, 0, GREY, 2, NAMES, noisy=True))
    assert rows(found[0]) <= rows(found[1])
    assert len(rows(found[1]) - rows(found[0])) <= (row.startswith("m90.png,mel"))


def npz(path: Path, count: int, *, groups: bool, more: Sequence[tuple[int, int, str]] = ()) -> Data:
    """Images by seed; `more`: seed, label and group of further ones."""
    listed = [(seed, seed % 2, f"P{seed // 4}") for seed in range(count)] + list(more)
    arrays: dict[str, Any] = {
        "train_images": np.stack([noise(seed) for seed, _, _ in listed]),
        "train_labels": np.array([label for _, label, _ in listed]),
    }
    if groups:
        arrays["train_group"] = np.array([group for _, _, group in listed])
    np.savez(path, **arrays)
    return settings("npz", path)


@pytest.mark.parametrize("held_out", HELD_OUT, ids=str)
@pytest.mark.parametrize("label", [0, 7, -1])  # the last two are no class: with noise none of them has the run refused
@pytest.mark.parametrize("groups", [False, True])
def test_a_row_of_an_npz_more_changes_itself(
    label: int, held_out: dict[str, Any], groups: bool, tmp_path: Path
) -> None:
    found = []
    for more in ((), [(900, label, "P900")]):
        data = npz(tmp_path / "a.npz", 40, groups=groups, more=more).model_copy(update=held_out)
        found.append(rows(load_site(data, 0, GREY, 2, noisy=True)))
    assert found[0] <= found[1]
    assert len(found[1] - found[0]) <= (label == 0)


def test_a_number_that_no_map_names_is_left_out_and_another_label_moves_no_image(tmp_path: Path) -> None:
    data = npz(tmp_path / "a.npz", 40, groups=False, more=[(900, 5, "")])
    data = data.model_copy(update={"label_map": {"0": "mel", "1": "nv"}, "local_test_fraction": 0.25})
    with pytest.raises(LabelsError):
        load_site(data, 0, GREY, 2, NAMES)
    with_it = load_site(data, 0, GREY, 2, NAMES, noisy=True)
    assert with_it.local_test is not None
    assert len(with_it.train) + len(with_it.local_test) == 40
    sets = []
    for label in (0, 1):
        data = npz(tmp_path / "a.npz", 40, groups=False, more=[(900, label, "")])
        data = data.model_copy(update={"local_test_fraction": 0.25})
        sets.append({image for image, _ in rows(load_site(data, 0, GREY, 2, noisy=True))})
    assert sets[0] == sets[1]


def test_equal_images_are_on_one_side_and_groups_in_two_parts_are_not_named() -> None:
    images = torch.from_numpy(np.stack([noise(seed % 500) for seed in range(1000)]).reshape(1000, 1, 1, -1))
    units = DataSplit(Examples(images, torch.zeros(1000, dtype=torch.int64))).with_units().units
    assert units is not None
    local, test = (held_out(units, 0.5, 0, purpose) for purpose in ("local test", "test"))
    assert (local[:500] == local[500:]).all()
    assert 180 < (local[:500] == test[:500]).sum() < 320
    assert held_out(units, 1.0, 0, "test").all()
    assert not (local == held_out(units, 0.5, 1, "local test")).all()
    groups = np.array(["Doe", "Doe", "Roe", "Poe"])
    check_apart(groups, [np.array([0, 1]), np.array([2]), np.array([3])], "the sites")
    with pytest.raises(DataError, match="1 groups are in more than one of the sites") as caught:
        check_apart(groups, [np.array([0, 2]), np.array([1, 3])], "the sites")
    assert "oe" not in str(caught.value)
    with_one_more = np.array([1000, 1001, 1000, np.nan])  # a row without a number moves no other group
    assert units_of_groups(with_one_more)[:3].tolist() == units_of_groups(with_one_more[:3]).tolist()


def test_few_images_are_no_reason_to_take_no_part(tmp_path: Path) -> None:
    for number in range(3):
        put(tmp_path / NAMES[number % 2] / f"{number}.png", noise(number))
    with pytest.raises(DataError, match="no test set"):
        load_site(settings("folder", tmp_path, local_test_fraction=0.25), 0, GREY, 2, NAMES)
    for seed in range(8):
        data = loaded(tmp_path, local_test_fraction=0.01, seed=seed)
        assert (len(data.train), data.local_test, data.own_test) == (3, None, True)


def test_without_noise_an_unreadable_file_still_has_the_run_refused(tmp_path: Path) -> None:
    put(folder(tmp_path) / "mel/P90_1.png", b"no image")
    with pytest.raises(TooManyUnreadableError):
        load_site(settings("folder", tmp_path), 0, GREY, 2, NAMES)


@pytest.mark.parametrize(
    "more",
    [{"partition": {"kind": "dirichlet", "sites": 2, "beta": 0.5}}, {"long_tail": 0.1}, {"auxiliary_per_class": 1}],
    ids=lambda more: next(iter(more)),
)
def test_settings_that_choose_images_by_counts_are_refused_by_name(more: dict[str, Any], tmp_path: Path) -> None:
    data = settings("npz", npz(tmp_path / "a.npz", 200, groups=False).root or tmp_path, test_fraction=0.3, **more)
    load_site(data, 0, GREY, 2)
    with pytest.raises(DataError, match=next(iter(more))):
        load_site(data, 0, GREY, 2, noisy=True)
    load_sites(data, GREY, 2, noisy=True)  # a simulation's, which protects nobody


def test_the_sites_of_a_simulation_share_the_evaluators_test_set(tmp_path: Path) -> None:
    data = npz(tmp_path / "a.npz", 80, groups=False).model_copy(update={"test_fraction": 0.3})
    (site,), evaluator = load_sites(data, GREY, 2, noisy=True), load_test(data, GREY, 2, noisy=True)
    assert torch.equal(site.test.pixels(), evaluator.test.pixels())
    assert (site.own_test, evaluator.own_test) == (True, False)
    assert len(site.train) + len(site.test) == 80


def test_a_site_in_a_column_of_which_no_test_row_is_takes_part(tmp_path: Path) -> None:
    images = np.stack([np.full((4, 4, 3), value, np.uint8) for value in range(20)])
    known: dict[str, Any] = {"train_labels": np.arange(20) % 2, "train_site": np.array(["a", "b"] * 10)}
    tested: dict[str, Any] = {"test_labels": np.arange(4) % 2, "test_site": np.array(["a"] * 4)}
    np.savez(tmp_path / "a.npz", train_images=images, test_images=images[:4], **known, **tested)
    data = settings("npz", tmp_path / "a.npz", partition={"kind": "column"})
    with pytest.raises(DataError, match="no examples in the test set"):
        load_site(data, 1, RGB, 2)
    assert len(load_site(data, 1, RGB, 2, noisy=True).train) == 10


def test_a_row_that_cannot_be_used_is_left_out_by_itself(tmp_path: Path) -> None:
    """Rows whose label is not clear, or whose name several files have, or none."""
    for number in range(20):
        put(tmp_path / "all" / f"{number}.png", noise(number))
    lines = ["image,mel,nv", *(f"{number},{number % 2},{1 - number % 2}" for number in range(20))]
    (tmp_path / "list.csv").write_text("\n".join(lines), encoding="utf-8")
    data = settings("manifest", tmp_path / "list.csv", path_column="image", label_column=["mel", "nv"])
    before = rows(load_site(data, 0, GREY, 2, NAMES, noisy=True))
    for name in ("b/90.png", "c/90.png", "b/91.png", "b/92.png", "b/93.png"):
        put(tmp_path / name, noise(900))
    lines += ["90,1,0", "91,1,1", "92,0,0", "93,-1,0", "94,1,0"]
    (tmp_path / "list.csv").write_text("\n".join(lines), encoding="utf-8")
    assert rows(load_site(data, 0, GREY, 2, NAMES, noisy=True)) == before


def test_sites_that_are_found_by_their_images_have_noise_bound_nothing(tmp_path: Path) -> None:
    for site in ("a", "b"):
        folder(tmp_path, first=site)
    data = settings("folder", tmp_path, partition={"kind": "column"}, local_test_fraction=0.25)
    with pytest.raises(DataError, match=r"finds sites by their images.*this site's own folder"):
        load_site(data, 1, GREY, 2, NAMES, noisy=True)
    assert len(load_sites(data, GREY, 2, NAMES, noisy=True)) == 2, "a simulation hides nobody"


def test_a_test_set_that_takes_a_whole_site_is_refused(tmp_path: Path) -> None:
    for site, label, number in [(site, label, number) for site in "abc" for label in NAMES for number in range(12)]:
        save(tmp_path / f"site {site}" / label / f"one {number}.png", np.full((4, 4), number, np.uint8))
    data = settings("folder", tmp_path, partition={"kind": "column"}, group_pattern="(one)")
    with pytest.raises(DataError, match=r"takes all images of site 'site .', because a group .*data\.group_pattern"):
        load_sites(data, GREY, 2, NAMES)
