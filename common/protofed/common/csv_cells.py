"""CSV tables whose cells no spreadsheet takes for a formula: names in them come from a server, a recipe or a file.

A text that begins with one of `= + - @`, a tab or a line break gets an apostrophe before it, as OWASP advises ("CSV
Injection"). Numbers stay as they are.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from typing import IO

_FORMULA = tuple("=+-@\t\r\n＝＋－＠")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)


def cell(value: object) -> object:
    """The value as a cell that is no formula; numbers, also as texts, and all other texts are unchanged."""
    if isinstance(value, str) and value.startswith(_FORMULA) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


class CsvTable:
    """Writes rows into a text file; the only use of `csv.writer`.

    Args:
        line_end: of each row.
    """

    def __init__(self, file: IO[str], line_end: str = "\r\n") -> None:
        self._writer = csv.writer(file, lineterminator=line_end)

    def row(self, values: Iterable[object]) -> None:
        """Write one row."""
        self._writer.writerow(map(cell, values))
