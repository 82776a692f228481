"""A manifest is read as any spreadsheet writes it; what is wrong is refused by its row, and nobody is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.image_files import settings

from protofed.client.data.image_files import Scan, scan
from protofed.common.errors import DataError

RUN = ("mel", "nv")


def table(root: Path, text: str | bytes) -> Scan:
    (root / "table.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return scan(settings("manifest", root / "table.csv"), RUN, len(RUN))


def told(found: Scan) -> list[tuple[str, str, int, str | None, str | None, int | None]]:
    return [(item.name, item.label, item.index, item.split, item.group, item.row) for item in found.items]


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


def test_columns_of_split_and_group_may_be_left_empty(tmp_path: Path) -> None:
    found = table(tmp_path, "label,path,group,split\nnv,b.png,,\nmel,a.png,,\n")
    assert told(found) == [("b.png", "nv", 1, None, None, 2), ("a.png", "mel", 0, None, None, 3)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"row 1: expected one column 'path'"),
        (
            "path,class\na,b\n",
            r"row 1: expected one column 'label' in the heading, of path, label and, optional, split",
        ),
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
        ('path,label\na.png,nv\n"Doe.png,nv\n', r"row 3 is no row of a \.csv file"),
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
