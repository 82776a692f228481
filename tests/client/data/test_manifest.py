"""A manifest is read as any spreadsheet writes it; what is wrong is refused by its row, and nobody is named."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tests.support.image_files import save, settings

from protofed.client.data.image_files import Scan, scan
from protofed.client.task import Target
from protofed.common.errors import DataError

RUN = ("mel", "nv")


def table(root: Path, text: str | bytes, **more: Any) -> Scan:
    (root / "table.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return scan(settings("manifest", root / "table.csv", **more), RUN, len(RUN))


def told(found: Scan) -> list[tuple[str, str, Target, str | None, str | None, int | None]]:
    return [(item.name, item.label, item.target, item.split, item.group, item.row) for item in found.items]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_manifest_is_read_as_any_spreadsheet_writes_it(separator: str, end: str, mark: bytes, tmp_path: Path) -> None:
    rows = [["Path ", "label", "notes", "Split", "group"], ["a/1.png", " mel", "", "Train", "007"]]
    rows += [[], [".\\a\\2.png", "nv ", '"x, y; z"', "test", "008"], ["", "", "", "", ""]]
    text = end.join(separator.join(cells) for cells in rows) + end
    assert told(table(tmp_path, mark + text.encode())) == [
        ("a/1.png", "mel", 0, "train", "007", 2),
        ("a/2.png", "nv", 1, "test", "008", 4),
    ]


def test_columns_of_split_and_group_may_be_left_empty_and_splits_have_their_usual_spellings(tmp_path: Path) -> None:
    found = table(tmp_path, "label,path,group,split\nnv,b.png,,\nmel,a.png,,\n")
    assert told(found) == [("b.png", "nv", 1, None, None, 2), ("a.png", "mel", 0, None, None, 3)]
    found = table(tmp_path, "path,label,split\na,nv,Training\nb,nv,valid\nc,nv,TESTING\n")
    assert [item.split for item in found.items] == ["train", "val", "test"]
    found = table(tmp_path, "sep=;\r\npath;label\r\n1,5.png;nv\r\n")
    assert [(item.name, item.row) for item in found.items] == [("1,5.png", 3)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"row 1: expected one column 'path'"),
        ("path,class\na,b\n", r"row 1: expected one column 'label' in the heading; name yours in data\.label_column"),
        ("path,label,Label\na,b,c\n", "expected one column 'label'"),
        ("path,label\nDoe.png\n", "row 2 has 1 cells; expected 2"),
        ("path,label\na.png,nv\n,nv\n", "row 3 has no path"),
        ("path,label\na.png,nv\nDoe.png,\n", "row 3 has no label"),
        ("path,label,group\na.png,nv,Doe\nb.png,nv,\n", "row 3 has no group; expected one in every row, or none"),
        ("path,label,split\na.png,nv,train\nb.png,nv,Doe\n", "row 3: its split is none of train, val, test"),
        ("path,label\nDoe.png,nv\n\na.png,nv\n./Doe.png,nv\n", "row 5 has the path of row 2"),
        ("path,label\n/Doe.png,nv\n", "row 2: its path leads out"),
        ("path,label\n../Doe.png,nv\n", "row 2: its path leads out"),
        ("path,label\na/../../Doe.png,nv\n", "row 2: its path leads out"),
        ("path,label\n..\\Doe.png,nv\n", "row 2: its path leads out"),
        ("path,label\nC:\\Doe.png,nv\n", "row 2: its path leads out"),
        ("path,label\nlink/a.png,nv\n", "row 2: links lead its path out"),
        ('path,label\na.png,nv\n"Doe.png,nv\n', r"row 3 cannot be read"),
        ("path,label\nDoé.png,nv\n".encode("cp1252"), "is not UTF-8; save it as 'CSV UTF-8'"),
        ("path,label\nDoe.png,nv\n".encode("utf-16"), "is not UTF-8"),
    ],
)
def test_rows_that_are_wrong_are_refused_by_number(text: str | bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    with pytest.raises(DataError, match=said) as caught:
        table(tmp_path / "in", text)
    assert "Do" not in str(caught.value)


def test_a_group_of_a_manifest_that_crosses_is_told_by_its_first_row(tmp_path: Path) -> None:
    text = "path,label,split,group\na.png,nv,train,p\nb.png,nv,train,Doe\nc.png,mel,test,Doe\n"
    found = table(tmp_path, text)
    assert [item.row for item in found.crossing] == [3, 4]
    with pytest.raises(DataError, match=r"1 groups are in both train and test \(the first in row 3\)") as caught:
        found.check()
    assert "Doe" not in str(caught.value)


def test_a_table_of_image_ids_finds_its_files_without_their_suffix(tmp_path: Path) -> None:
    """HAM10000: two folders of images, and columns of other names."""
    first, second = (save(tmp_path / f"images_part_{part}" / f"ISIC_{part}.jpg") for part in (1, 2))
    (tmp_path / "images_part_1" / "ISIC_1.json").write_text("{}", encoding="utf-8")
    text = "lesion_id,image_id,dx,dataset\nHAM_7,ISIC_1,nv,rosendahl\nHAM_8,ISIC_2,mel,vienna\n"
    columns = {"path_column": "image_id", "label_column": "dx", "group_column": "lesion_id", "site_column": "dataset"}
    found = table(tmp_path, text, **columns, partition={"kind": "column"})
    found.check()
    assert [item.path for item in found.items] == [first, second]
    assert [(item.target, item.group, item.site) for item in found.items] == [
        (1, "HAM_7", "rosendahl"),
        (0, "HAM_8", "vienna"),
    ]


def test_a_table_of_file_names_finds_them_in_its_folders(tmp_path: Path) -> None:
    """NIH ChestX-ray14: the names alone; several findings in one cell are told from a label, and can be ignored."""
    file = save(tmp_path / "images_001" / "images" / "7_000.png")
    text = "Image Index,Finding Labels,Patient ID\n7_000.png,nv,7\n7_001.png,nv|mel,7\n"
    columns = {"path_column": "Image Index", "label_column": "Finding Labels", "group_column": "Patient ID"}
    found = table(tmp_path, text, **columns)
    assert [item.path for item in found.items] == [file]
    with pytest.raises(DataError, match="the run cannot use: 'several labels'"):
        found.check()
    assert table(tmp_path, text, **columns, ignore_labels=["several labels"]).ignored == {"several labels": 1}


def test_a_row_is_of_the_one_label_whose_column_has_a_one(tmp_path: Path) -> None:
    """ISIC 2019; and CheXpert, whose rows may have several labels, none, or an uncertain one."""
    text = "path,MEL,NV\na.png,1.0,0.0\nb.png,,1\nc.png,1,1\nd.png,0,0\ne.png,-1.0,0\nf.png,Doe,1\n"
    told_apart = {"label_column": ["MEL", "NV"], "label_map": {"MEL": "mel", "NV": "nv"}}
    found = table(tmp_path, text, **told_apart)
    assert [(item.name, item.target) for item in found.items] == [("a.png", 0), ("b.png", 1)]
    assert found.unmapped == {"several labels": 1, "no label": 1, "unclear label": 2}
    with pytest.raises(DataError, match=r"'no label', 'several labels'.*data\.ignore_labels") as caught:
        found.check()
    assert "Doe" not in str(caught.value)


def test_a_path_may_begin_with_the_folder_that_the_table_lies_in(tmp_path: Path) -> None:
    """CheXpert: its patients are in the paths alone."""
    file = save(tmp_path / "CheXpert-small" / "train" / "patient1" / "view1.jpg")
    text = "Path,label\nCheXpert-small/train/patient1/view1.jpg,nv\n"
    found = table(tmp_path / "CheXpert-small", text, group_pattern=r"/(patient\d+)/")
    assert [(item.path, item.group) for item in found.items] == [(file, "patient1")]
    save(tmp_path / "CheXpert-small" / "view2.jpg")
    (item,) = table(tmp_path / "CheXpert-small", "path,label\nother/view2.jpg,nv\n").items
    assert not item.path.exists(), "a file of another folder is another patient's"


def test_a_name_that_several_files_have_is_refused_by_its_row(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        save(tmp_path / folder / "1.png")
    save(tmp_path / "2.png")
    found = table(tmp_path, "path,label\n2,nv\n1.png,nv\n")
    with pytest.raises(DataError, match="row 3 of the manifest gives a name that several files below its folder have"):
        found.check()
    assert [item.name for item in found.usable()] == ["2"], "with noise each is left out by itself"
    table(tmp_path, "path,label\n2,nv\na/1,nv\n").check()
    with pytest.raises(DataError, match="row 3 has the path of row 2"):
        table(tmp_path, "path,label\n2,nv\n2.png,nv\n")


def test_names_of_a_table_are_found_in_any_composition_and_no_site_without_its_column(tmp_path: Path) -> None:
    file = save(tmp_path / unicodedata.normalize("NFD", "Läsion") / unicodedata.normalize("NFD", "é.png"))
    assert [item.path for item in table(tmp_path, "path,label\nLäsion/é.png,nv\n").items] == [file]
    with pytest.raises(DataError, match=r"one column 'site' in the heading; name yours in data\.site_column"):
        table(tmp_path, "path,label\na,nv\n", partition={"kind": "column"})
    assert table(tmp_path, "path,label,site\na,nv,\n").items[0].site is None, "the column is read with the partition"


@pytest.mark.parametrize("head", [b"PK\x03\x04", b"\xd0\xcf\x11\xe0\xa1\xb1"])
def test_a_workbook_is_refused_with_what_to_save_instead(head: bytes, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Excel workbook\. Save its sheet as 'CSV UTF-8'"):
        table(tmp_path, head + bytes(100))
