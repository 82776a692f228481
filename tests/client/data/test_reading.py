"""Files become examples in a fixed order, whichever thread is first; what cannot be read is counted, never named."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from tests.support.image_files import RGB, classes, input_, save, settings, shade

from protofed.client.data import pictures, reading
from protofed.client.data.decoding import Pixels, decode_file
from protofed.client.data.pictures import FilePicture
from protofed.client.data.reading import read_images
from protofed.client.data.site import load_site, load_sites, load_test
from protofed.client.data.sources import Source, load
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

RUN = ("mel", "nv")


def folder(root: Path, **more: Any) -> Source:
    return load(settings("folder", root, **more), RGB, RUN)


def shades(images: torch.Tensor) -> list[int]:
    return images[:, 0, 0, 0].tolist()


def split(root: Path, **names: int) -> Path:
    """`train` and `test` with so many images of each class; those of test begin at shade 100."""
    classes(root / "train", names)
    classes(root / "test", names, first=100)
    return root


def test_a_split_of_the_files_own_is_kept(tmp_path: Path) -> None:
    classes(split(tmp_path, mel=2, nv=3) / "val", {"nv": 2}, first=200)
    source = folder(tmp_path)
    assert (shades(source.train.pixels()), source.train.labels.tolist()) == ([0, 1, 10, 11, 12], [0, 0, 1, 1, 1])
    assert (shades(source.test.pixels()), source.test.labels.tolist()) == ([100, 101, 110, 111, 112], [0, 0, 1, 1, 1])
    assert source.train.pixels().dtype == torch.uint8
    with pytest.raises(DataError, match=r"data\.test_fraction"):
        folder(tmp_path, test_fraction=0.3)


def test_without_one_a_test_set_is_held_out_by_the_seed_as_of_an_npz(tmp_path: Path) -> None:
    classes(tmp_path / "files", {"mel": 10, "nv": 20})
    source = folder(tmp_path / "files", test_fraction=0.4)
    assert source.test.labels.bincount().tolist() == [5, 8]
    assert sorted(shades(source.train.pixels()) + shades(source.test.pixels())) == list(range(30))
    assert [shade >= 10 for shade in shades(source.train.pixels())] == source.train.labels.tolist()
    images = np.stack([shade(number) for number in range(30)])
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=np.repeat([0, 1], [10, 20]))
    files, arrays = folder(tmp_path / "files", seed=3), load(settings("npz", tmp_path / "a.npz", seed=3), RGB)
    assert (
        shades(files.test.pixels()) == shades(arrays.test.pixels()) != shades(folder(tmp_path / "files").test.pixels())
    )
    assert torch.equal(files.train.pixels(), arrays.train.pixels())


def test_threads_that_overtake_one_another_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes(tmp_path, {"nv": 10})
    paths = sorted((tmp_path / "nv").iterdir())

    def slow(path: Path, input_: Input, part: str) -> Pixels:
        time.sleep(0.02 * (int(path.stem) % 3 == 0))
        return decode_file(path, input_, part)

    monkeypatch.setattr(pictures, "decode_file", slow)
    monkeypatch.setattr(reading, "AHEAD_BYTES", 1)  # of 8 at a time, not all at once
    read = read_images([FilePicture(path) for path in paths], RGB, None)
    assert read.images[:, 0, 0, 0].tolist() == list(range(10))
    assert (read.rows.tolist(), read.reasons) == (list(range(10)), [None] * 10)


def test_one_deep_file_makes_all_of_them_deep(tmp_path: Path) -> None:
    paths = [save(tmp_path / f"{n}.png", np.full((4, 4), n * 51, np.uint8)) for n in range(3)]
    paths.insert(2, save(tmp_path / "deep.png", np.full((4, 4), 13107, np.uint16)))
    images = read_images([FilePicture(path) for path in paths], input_((1, 4, 4)), None).images
    assert images.dtype == torch.uint16
    assert images[:, 0, 0, 0].tolist() == [0, 13107, 13107, 26214]  # n * 51 * 257


def damaged(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_bytes(b"Doe")


def test_unreadable_files_are_refused_by_count_and_never_by_name(tmp_path: Path) -> None:
    classes(tmp_path, {"mel": 10, "nv": 10})
    damaged(tmp_path, "nv/Doe.png", "Doe.bin", "Roe")
    (tmp_path / "mel" / "Doe.png").touch()
    with pytest.raises(DataError, match=r"4 of 24 images .*: 2 × in no class's folder, 1 × .*, 1 × ") as said:
        folder(tmp_path)
    assert "1 × empty" in str(said.value)
    assert "Doe" not in str(said.value)


def test_a_share_that_is_tolerated_is_left_out_and_logged_as_a_count(tmp_path: Path) -> None:
    damaged(split(tmp_path, mel=2, nv=2), "train/nv/Doe.png", "test/mel/00.png", "Doe.bin")
    with capture_logs() as logs:
        source = folder(tmp_path, max_unreadable_fraction=0.35)
    assert (shades(source.train.pixels()), shades(source.test.pixels())) == ([0, 1, 10, 11], [101, 110, 111])
    assert source.test.labels.tolist() == [0, 1, 1]
    (line,) = logs
    assert line == {"event": "images cannot be read and are left out", "log_level": "warning", "count": 3}
    with pytest.raises(DataError, match=r"3 of 10 images cannot be read"):
        folder(tmp_path, max_unreadable_fraction=0.29)
    classes(tmp_path / "named", {"mel": 10, "nv": 10})  # and what is left out by its name
    damaged(tmp_path / "named", "readme.txt", "nv/Doe.pdf", "nv/@Recycle/Doe.png")
    with capture_logs() as logs:
        source = folder(tmp_path / "named")
    assert len(source.train) + len(source.test) == 20
    (line,) = logs
    assert (line["count"], "left out" in line["event"], "Doe" in str(line)) == (3, True, False)


def test_own_folders_of_sites_are_cut_into_sites(tmp_path: Path) -> None:
    for place, site in enumerate(("site 1", "site 2")):
        split(tmp_path / site, mel=2 + place, nv=1)
    data = settings("folder", tmp_path, partition={"kind": "column"})
    first, second = load_sites(data, RGB, 2, RUN)
    assert (len(first.train), len(second.train)) == (3, 4)
    assert first.local_test is not None
    assert second.local_test is not None
    assert (len(first.local_test), len(second.local_test), len(first.test)) == (3, 4, 7)
    assert len(load_site(data, 1, RGB, 2, RUN).train) == 4


def test_a_site_too_small_for_a_test_set_that_is_held_out_by_class_takes_part(tmp_path: Path) -> None:
    classes(tmp_path / "large", {"mel": 30, "nv": 30})
    classes(tmp_path / "small", {"mel": 1}, first=100)
    sites = load_sites(settings("folder", tmp_path, partition={"kind": "column"}), RGB, 2, RUN)
    assert [site.local_test is not None for site in sites] == [True, False]


def test_a_file_that_becomes_unreadable_moves_no_other(tmp_path: Path) -> None:
    classes(tmp_path, {"mel": 10, "nv": 10})
    before = folder(tmp_path)
    (tmp_path / "mel" / "03.png").write_bytes(b"")
    after = folder(tmp_path, max_unreadable_fraction=0.1)
    for one, other in ((before.train, after.train), (before.test, after.test)):
        assert [shade for shade in shades(one.pixels()) if shade != 3] == shades(other.pixels())


def test_groups_stay_together_through_every_split(tmp_path: Path) -> None:
    for number in range(80):
        save(tmp_path / RUN[number % 2] / f"p{number // 4:02}_{number}.png", shade(number))
    data = settings("folder", tmp_path, group_pattern=r"p(\d+)_", test_fraction=0.25, local_test_fraction=0.25)
    source = load(data, RGB, RUN)
    groups, test_groups = source.group_column, source.test_group_column
    assert groups is not None
    assert test_groups is not None
    assert [f"{shade // 4:02}" for shade in shades(source.train.pixels())] == groups.tolist()
    assert not set(groups) & set(test_groups)
    (site,) = load_sites(data, RGB, 2, class_names=RUN)
    assert site.local_test is not None
    parts = [{shade // 4 for shade in shades(part.pixels())} for part in (site.train, site.test, site.local_test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 20
    assert all(parts)


def test_a_simulation_that_would_divide_groups_is_refused(tmp_path: Path) -> None:
    classes(tmp_path, {"mel": 20, "nv": 20})
    cut = {"kind": "dirichlet", "sites": 2, "beta": 1.0}
    data = settings("folder", tmp_path, group_pattern=r"(\d)\.", partition=cut)
    with pytest.raises(DataError, match=r"'dirichlet'.*'whole'.*'column'"):
        load_sites(data, RGB, 2, class_names=RUN)


def test_an_evaluator_and_a_daemon_get_the_vocabulary_too(tmp_path: Path) -> None:
    data = settings("folder", split(tmp_path, mel=1, nv=2))
    assert load_test(data, RGB, 2, class_names=RUN).test.labels.tolist() == [0, 1, 1]
    assert load_site(data, 0, RGB, 2, class_names=RUN[::-1]).train.labels.tolist() == [1, 0, 0]
    with pytest.raises(DataError, match="no `class_names`"):
        load_site(data, 0, RGB, 2)


def test_a_site_may_have_a_test_set_only_and_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    classes(tmp_path / "test", {"nv": 3})
    data = settings("folder", tmp_path)
    assert len(load_test(data, RGB, 2, class_names=RUN).test) == 3
    with pytest.raises(DataError, match="no training examples"):
        load_site(data, 0, RGB, 2, class_names=RUN)
    classes(tmp_path / "none" / "a", {"nv": 0})
    for name in ("a", "."):
        with pytest.raises(DataError, match="no images to train on or to test"):
            folder(tmp_path / "none" / name, ignore_labels=["a"])


def test_a_manifest_is_loaded_in_its_own_order(tmp_path: Path) -> None:
    rows = ["path;label;split;group"]
    for number in (3, 1, 2, 4):
        save(tmp_path / "images" / f"{number}.png", shade(number))
        label, half = "melanoma" if number % 2 else "nv", "test" if number == 2 else "train"
        rows.append(f"images/{number}.png;{label};{half};p{number}")
    (tmp_path / "table.csv").write_text("\n".join(rows))
    data = settings("manifest", tmp_path / "table.csv", label_map={"melanoma": "mel"})
    source = load(data, RGB, RUN)
    assert (shades(source.train.pixels()), source.train.labels.tolist()) == ([3, 1, 4], [0, 0, 1])
    assert shades(source.test.pixels()) == [2]
    (tmp_path / "images" / "4.png").unlink()
    with pytest.raises(DataError, match=r"1 of 4 images cannot be read: 1 × no such file"):
        load(data, RGB, RUN)
