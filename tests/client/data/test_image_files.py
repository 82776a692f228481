"""What a site has is told whole, in a fixed order; what would mislead a run is refused, and nobody is named."""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.image_files import RGB, classes, save, settings

from protofed.client.data import labels
from protofed.client.data.file_entry import TooManyUnreadableError
from protofed.client.data.image_files import Scan, scan
from protofed.client.data.reading import Reading
from protofed.client.data.sources import read_files
from protofed.client.task import Target
from protofed.common.errors import DataError

RUN = ("mel", "nv")
MELANOMA = "Melanoma, malignant"
OWN = {MELANOMA: "mel"}


def folder(root: Path, class_names: Sequence[str] = RUN, **more: Any) -> Scan:
    return scan(settings("folder", root, **more), class_names, len(class_names))


def told(found: Scan) -> list[tuple[str, str, Target, str | None, str | None, int | None]]:
    return [(item.name, item.label, item.target, item.split, item.group, item.row) for item in found.items]


def test_a_folder_for_each_class_in_the_order_of_names(tmp_path: Path) -> None:
    classes(tmp_path, {"nv": 2, "mel": 1})
    (tmp_path / "empty").mkdir()
    save(tmp_path / "mel" / "patient" / "x.jpg")
    found = folder(tmp_path)
    assert told(found) == [
        ("mel/00.png", "mel", 0, None, None, None),
        ("mel/patient/x.jpg", "mel", 0, None, None, None),
        ("nv/00.png", "nv", 1, None, None, None),
        ("nv/01.png", "nv", 1, None, None, None),
    ]
    assert [item.path for item in found.items] == [tmp_path / item.name for item in found.items]
    found.check()


def test_folders_may_be_split_already(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        classes(tmp_path / split, {"nv": 1})
    assert [(item.name, item.split) for item in folder(tmp_path).items] == [
        ("test/nv/00.png", "test"),
        ("train/nv/00.png", "train"),
        ("val/nv/00.png", "val"),
    ]
    (tmp_path / "nv").mkdir()
    with pytest.raises(DataError, match="'test' beside"):
        folder(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *[".DS_Store", "Thumbs.db", "desktop.ini", ".hidden/a.png", "__MACOSX/a.png", "@eaDir/a.png", "DICOMDIR"],
        *["a.png:Zone.Identifier", "~snapshot/a.png"],
        *["#recycle/a.png", "@Recycle/a.png", "$RECYCLE.BIN/a.png", ".Trash-1000/a.png", "lost+found/a.png"],
        *["readme.txt", "labels.CSV", "a.json", "a.xml", "LICENSE.md", "a.pdf", "a.ini", "a.db"],
    ],
)
def test_what_systems_leave_behind_is_left_out_by_name(name: str, tmp_path: Path) -> None:
    classes(tmp_path, {"nv": 1})
    for place in (tmp_path, tmp_path / "nv"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(b"x")
    found = folder(tmp_path)
    assert ([item.name for item in found.items], list(found.misplaced)) == (["nv/00.png"], [])
    first = name.split("/")[0]
    assert list(found.left_out) == sorted([first, f"nv/{first}"])
    found.check()


@pytest.mark.parametrize(
    "names", [("Train", "Test"), ("Training", "Testing"), ("training", "validation", "test"), ("TRAIN", "valid")]
)
def test_splits_are_known_by_their_usual_spellings(names: Sequence[str], tmp_path: Path) -> None:
    for name in names:
        classes(tmp_path / name, {"nv": 1})
    found = folder(tmp_path)
    found.check()
    splits = {"tr": "train", "va": "val", "te": "test"}
    assert {item.name.split("/")[0]: item.split for item in found.items} == {
        name: splits[name[:2].lower()] for name in names
    }


def test_where_a_folder_may_be_a_split_or_a_class_it_is_said_what_to_rename(tmp_path: Path) -> None:
    quality = classes(tmp_path / "quality", {"valid": 1, "invalid": 1})
    assert [item.label for item in folder(quality, ("invalid", "valid")).items] == ["invalid", "valid"]
    beside = classes(tmp_path / "beside" / "Training", {"nv": 1}).parent
    classes(beside, {"mel": 1})
    with pytest.raises(DataError, match="'Training' are splits and no classes, name the folders train, val and test"):
        folder(beside).check()
    (beside / "Testing").mkdir()
    with pytest.raises(DataError, match=r"'Testing' beside 1 others. .* Move or rename"):
        folder(beside)
    for name in ("Train", "training"):
        classes(tmp_path / "twice" / name, {"nv": 1})
    with pytest.raises(DataError, match="two folders for one split among Train, training"):
        folder(tmp_path / "twice")


def test_splits_in_the_folders_of_classes_and_folders_named_like_splits_are_refused(tmp_path: Path) -> None:
    for name in ("nv/train/a.png", "nv/test/b.png", "mel/train/a.png", "mel/test/b.png"):
        save(tmp_path / "in" / name)
    with pytest.raises(DataError, match="splits in the folders of classes"):
        folder(tmp_path / "in")
    for number, name in enumerate(RUN):
        (tmp_path / "in" / name / "test").rename(tmp_path / "in" / name / f"patient {number}")
    assert len(folder(tmp_path / "in").items) == 4
    for name in ("Train_images", "test_images"):
        classes(tmp_path / "like" / name, {"nv": 1})
    with pytest.raises(DataError, match="If 'Train_images', 'test_images' are splits"):
        folder(tmp_path / "like").check()


def test_the_first_folders_are_sites_where_the_sites_are_a_column(tmp_path: Path) -> None:
    classes(tmp_path / "site 1" / "test", {"nv": 1})
    classes(tmp_path / "site 2" / "train", {"mel": 1})
    save(tmp_path / "site 1" / "loose.png")
    save(tmp_path / "looser.png")
    found = folder(tmp_path, partition={"kind": "column"})
    found.check()
    assert [(item.name, item.site, item.label, item.split) for item in found.items] == [
        ("site 1/test/nv/00.png", "site 1", "nv", "test"),
        ("site 2/train/mel/00.png", "site 2", "mel", "train"),
    ]
    assert list(found.misplaced) == ["looser.png", "site 1/loose.png"]
    classes(tmp_path / "site 3", {"nv": 1})
    with pytest.raises(DataError, match="only some sites have folders train and test"):
        folder(tmp_path, partition={"kind": "column"})
    (tmp_path / "test").mkdir()
    with pytest.raises(DataError, match="'test' where partition 'column' expects sites"):
        folder(tmp_path, partition={"kind": "column"})


def test_labels_and_groups_are_found_in_any_composition_and_groups_cross_no_split(tmp_path: Path) -> None:
    save(tmp_path / unicodedata.normalize("NFD", "Mélanome") / f"{unicodedata.normalize('NFD', 'Zoë')}_1.png")
    (item,) = folder(tmp_path, label_map={"Mélanome": "mel"}, group_pattern="/(Zoë)_").items
    assert (item.target, item.group) == (0, "Zoë")
    for name in ("train/nv/P1_a", "test/nv/P1_b", "val/nv/P2_a", "train/nv/P2_b", "test/nv/P3_a"):
        save(tmp_path / "1" / f"{name}.png")
    found = folder(tmp_path / "1", group_pattern=r"(P\d)")
    assert [item.name for item in found.crossing] == ["test/nv/P1_b.png", "train/nv/P1_a.png"]
    with pytest.raises(DataError, match="1 groups are in both train and test; expected") as caught:
        found.check()
    assert "P1" not in str(caught.value)
    assert not folder(
        tmp_path / "1", group_pattern=r"(P\d)", merge_test_into_train=True, local_test_fraction=0.5
    ).crossing


def test_what_lies_in_no_class_is_astray_and_what_is_unknown_an_item(tmp_path: Path) -> None:
    classes(tmp_path, {"nv": 1})
    (tmp_path / "loose").write_text("about")
    (tmp_path / "nv" / "1.2.840.5").write_text("about")
    found = folder(tmp_path)
    assert list(found.misplaced) == ["loose"]
    assert [item.name for item in found.items] == ["nv/00.png", "nv/1.2.840.5"]
    for name in ("train", "test"):
        classes(tmp_path / "split" / name, {"nv": 1})
    save(tmp_path / "split" / "train" / "loose.png")
    assert list(folder(tmp_path / "split").misplaced) == ["train/loose.png"]


def test_links_out_of_the_folder_are_refused_and_counted(tmp_path: Path) -> None:
    root, other = classes(tmp_path / "in", {"nv": 1}), classes(tmp_path / "out", {"nv": 2})
    (root / "nv" / "again.png").symlink_to(root / "nv" / "00.png")
    assert len(folder(root).items) == 2
    (root / "nv" / "a.png").symlink_to(other / "nv" / "00.png")
    with pytest.raises(DataError, match="a link leads out of this folder"):
        folder(root)
    (root / "nv" / "b.png").symlink_to("../../out/nv/gone.png")
    (root / "mel").symlink_to(other / "nv")
    with pytest.raises(DataError, match="3 links lead out of this folder"):
        folder(root)


def test_a_link_to_itself_is_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    root = classes(tmp_path / "in", {"nv": 20, "mel": 20})
    (root / "nv" / "loop.png").symlink_to("loop.png")
    (tmp_path / "link").symlink_to(root)  # a folder may itself be a link
    assert len(folder(root).items) == len(folder(tmp_path / "link").items) == 41
    with pytest.raises(TooManyUnreadableError) as caught:
        read_files(settings("folder", root), RGB, RUN, Reading())
    assert [name for name, _ in caught.value.files] == ["nv/loop.png"]


def test_a_root_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROTOFED_DATA", raising=False)
    with pytest.raises(DataError, match=r"there is no folder .*none"):
        folder(tmp_path / "none")
    for source in ("folder", "manifest"):
        with pytest.raises(DataError, match=r"no data\.root"):
            scan(settings(source, tmp_path).model_copy(update={"root": None}), RUN, 2)
    with pytest.raises(DataError, match=r"cannot read .*No such file"):
        scan(settings("manifest", tmp_path / "no.csv"), RUN, 2)
    for class_names in ((), ("mel",)):
        with pytest.raises(DataError, match="no `class_names`"):
            scan(settings("folder", tmp_path), class_names, 2)


def test_a_folder_nobody_may_read_is_named_by_its_root_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes(tmp_path, {"nv": 1})

    def walk(root: Path, onerror: Any) -> list[Any]:
        onerror(PermissionError(13, "Permission denied", str(tmp_path / "nv" / "Jane Doe")))
        return []

    monkeypatch.setattr(os, "walk", walk)
    with pytest.raises(DataError, match=r"cannot read a folder in .*Permission denied") as caught:
        folder(tmp_path)
    assert "Doe" not in str(caught.value)


def test_own_labels_come_to_the_runs_by_the_map_or_by_their_name(tmp_path: Path) -> None:
    classes(tmp_path, {MELANOMA: 1, "nv": 1, "unsure": 2})
    found = folder(tmp_path, label_map=OWN, ignore_labels=["unsure"])
    found.check()
    assert [(item.label, item.target) for item in found.items] == [(MELANOMA, 0), ("nv", 1)]
    assert found.ignored == {"unsure": 2}
    assert [item.label for item in folder(tmp_path, ignore_labels=["nv", "unsure"], label_map=OWN).items] == [MELANOMA]
    with pytest.raises(DataError, match=r"'mell'.*'mel'"):
        folder(tmp_path, label_map={"a": "mell", "b": "nv"})
    renamed = folder(tmp_path, label_map={MELANOMA: "nv", "nv": "mel"}, ignore_labels=["unsure"])
    assert [item.target for item in renamed.items] == [1, 0]  # what the map says comes before the name


def test_labels_that_mean_nothing_are_refused_by_name_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes(tmp_path, {"MEL": 2, "nevus": 1, "zzz": 1, "nv": 1})
    found = folder(tmp_path)
    assert found.unmapped == {"MEL": 2, "nevus": 1, "zzz": 1}
    with pytest.raises(DataError, match=r"'MEL'.*'mel'.*'nevus'.*'nv'.*'zzz'"):
        found.check()
    monkeypatch.setattr(labels, "MAX_NAMED", 2)  # a column of something else is not listed to its end
    with pytest.raises(DataError, match=r"'MEL'.*'nevus'") as caught:
        found.check()
    assert "zzz" not in str(caught.value)


def test_bytes_that_are_no_text_can_still_be_told(tmp_path: Path) -> None:
    os.mkdir(os.fsencode(tmp_path) + b"/nv\xff")
    save(tmp_path / "nv" / "a.png")
    os.rename(tmp_path / "nv" / "a.png", os.fsencode(tmp_path) + b"/nv\xff/a.png")
    found = folder(tmp_path)
    with pytest.raises(DataError, match="nv") as caught:
        found.check()
    assert r"'nv\xff'" in str(caught.value).encode().decode()


def test_groups_are_what_the_expression_finds_in_the_path(tmp_path: Path) -> None:
    for name in ("P1_a", "P2_a", "P1_b"):
        save(tmp_path / "nv" / f"{name}.png")
    found = folder(tmp_path, group_pattern=r"/(P\d+)_")
    assert [item.group for item in found.items] == ["P1", "P1", "P2"]
    for site in "ab":  # patients of two sites are two
        save(tmp_path / "sites" / site / "nv" / "P1_x.png")
    sites = folder(tmp_path / "sites", partition={"kind": "column"}, group_pattern=r"/(P\d)_")
    assert [item.group for item in sites.items] == ["a/P1", "b/P1"]
    shutil.rmtree(tmp_path / "sites")
    assert "P1" not in repr(found.items[0]).replace("P1_a", "")
    save(tmp_path / "nv" / "other.png")
    found = folder(tmp_path, group_pattern=r"/(P\d+)_")
    assert [item.name for item in found.ungrouped] == ["nv/other.png"]
    with pytest.raises(DataError, match="does not match the paths of all images"):
        found.check()
