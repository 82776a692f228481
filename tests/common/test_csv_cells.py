"""No cell of a table is a formula, and no number changes."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest

from protofed.common.csv_cells import CsvTable, cell

FORMULAS = ["=HYPERLINK(1)", "+1+cmd|' /C calc'!A0", "-1-1", "@SUM(A1)", "\t=1", "\n=1", "＝1", "-", "-1e", "--1"]
UNCHANGED = ["", "cat", "a=b", " ", "-0.5", "-1.5e-07", "+3", "1", "-.5", "class 1", "'=quoted"]


@pytest.mark.parametrize("text", FORMULAS)
def test_what_a_spreadsheet_would_evaluate_becomes_text(text: str) -> None:
    assert cell(text) == f"'{text}"


@pytest.mark.parametrize("value", [*UNCHANGED, -0.5, -3, 0, None, True])
def test_numbers_and_other_texts_stay(value: object) -> None:
    assert cell(value) is value


def test_every_cell_of_a_row_is_made_safe() -> None:
    file = io.StringIO()
    table = CsvTable(file, "\n")
    table.row(["path", "=1+1", -1.0])
    table.row(["-0.250000", '=HYPERLINK("x,y")'])
    rows = list(csv.reader(io.StringIO(file.getvalue())))
    assert rows == [["path", "'=1+1", "-1.0"], ["-0.250000", '\'=HYPERLINK("x,y")']]


def test_nothing_else_writes_csv() -> None:
    wings = [Path(__file__).parents[2] / wing for wing in ("common", "server", "client", "deploy")]
    writers = {
        path.name
        for wing in wings
        for path in wing.rglob("*.py")
        if re.search(r"csv\.writer|DictWriter|to_csv", path.read_text(encoding="utf-8"))
    }
    assert writers == {"csv_cells.py"}
