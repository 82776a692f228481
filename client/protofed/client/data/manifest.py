"""The source `manifest`: a .csv of images with the columns path and label and, optional, split and group.

Errors name rows, as a spreadsheet counts them, and never a row's content, which may be about patients.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from protofed.client.data.file_entry import SPLITS, FileEntry, Split, leaves_root
from protofed.client.data.labels import normalise
from protofed.common.errors import DataError

NEEDED, OPTIONAL = ("path", "label"), ("split", "group")
SEPARATORS = (",", ";", "\t")
_DRIVE = re.compile(r"[A-Za-z]:")


def read(file: Path) -> list[FileEntry]:
    """The files that a manifest lists, in its order; empty rows are skipped.

    Raises:
        DataError: the file is missing or no table, a column is missing, or a row is wrong; names the row's number.
    """
    records = _records(file)
    optional = [name for name in OPTIONAL if any(cells.get(name) for _, cells in records)]
    root = file.parent.resolve()
    entries, rows = list[FileEntry](), dict[str, int]()
    for row, cells in records:
        where = f"{file}, row {row}"
        if missing := [name for name in (*NEEDED, *optional) if not cells[name]]:
            raise DataError(f"{where} has no {' and no '.join(missing)}; expected one in every row, or none at all")
        name = _name(cells["path"], where)
        if leaves_root(root / name, root):
            raise DataError(f"{where}: links lead its path out of the manifest's folder; expected a file in it")
        if name in rows:
            raise DataError(f"{where} has the path of row {rows[name]}; expected every image once")
        rows[name] = row
        group = cells["group"] if "group" in optional else None
        label, split = normalise(cells["label"]), _split(cells, optional, where)
        entries.append(FileEntry(root / name, name, label, split, group, row))
    return entries


def _records(file: Path) -> list[tuple[int, Mapping[str, str]]]:
    """Row number and cells by column of every row that is not empty."""
    rows = _rows(file)
    first, heading = next(rows, (1, []))
    columns = [name.casefold() for name in heading]
    for name in (*NEEDED, *OPTIONAL):
        if columns.count(name) > 1 or (name in NEEDED and name not in columns):
            raise DataError(
                f"{file}, row {first}: expected one column '{name}' in the heading, of {', '.join(NEEDED)} and, "
                f"optional, {', '.join(OPTIONAL)}"
            )
    records = list[tuple[int, Mapping[str, str]]]()
    for row, cells in rows:
        if len(cells) != len(columns):
            raise DataError(f"{file}, row {row} has {len(cells)} cells; expected {len(columns)}, as the heading has")
        records.append((row, dict(zip(columns, cells, strict=True))))
    return records


def _rows(file: Path) -> Iterator[tuple[int, Sequence[str]]]:
    """Number and stripped cells of every row that is not empty."""
    row = 0
    try:
        # utf-8-sig: Excel begins its "CSV UTF-8" with a byte order mark, which would become part of the first heading.
        with file.open(encoding="utf-8-sig", newline="") as stream:
            separator = _separator(stream.readline())
            stream.seek(0)
            for row, cells in enumerate(csv.reader(stream, delimiter=separator, strict=True), start=1):
                if any(stripped := [cell.strip() for cell in cells]):
                    yield row, stripped
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}; expected a manifest, a .csv file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8; save it as 'CSV UTF-8'") from error
    except csv.Error as error:
        raise DataError(f"{file}, row {row + 1} is no row of a .csv file ({error})") from error


def _separator(heading: str) -> str:
    """The separator that the heading has most of: Excel's depends on its language."""
    return max(SEPARATORS, key=heading.count)


def _name(cell: str, where: str) -> str:
    """The path below the manifest's folder, with slashes; Windows' backslashes are accepted."""
    path = PurePosixPath(cell.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or _DRIVE.match(cell) or "\0" in cell:
        raise DataError(
            f"{where}: its path leads out of the manifest's folder; expected one relative to it, without .."
        )
    return os.fspath(path)


def _split(cells: Mapping[str, str], optional: Sequence[str], where: str) -> Split | None:
    if "split" not in optional:
        return None
    for split in SPLITS:
        if cells["split"].casefold() == split:
            return split
    raise DataError(f"{where}: its split is none of {', '.join(SPLITS)}")
