"""The image files of the sources `folder` and `manifest`: names, labels and groups, without decoding a file.

The source `manifest`: a .csv of images with a path and a label and, optional, split, group and site.

Errors name rows, as a spreadsheet counts them, and never a row's content, which may be about patients.
"""

from __future__ import annotations

import csv
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

from protofed.client.data import dicomweb, folder
from protofed.client.data.decoding import list_parts, silence_decoders
from protofed.client.data.file_entry import (
    SPLITS,
    FileEntry,
    Listing,
    PacsImage,
    Split,
    leaves_root,
    normalise,
    parse_split,
)
from protofed.client.data.folder import walk
from protofed.client.data.labels import LabelMap
from protofed.client.data.pictures import FilePicture, StoredPicture
from protofed.client.data.volumes import ImageTile, gives_several
from protofed.client.task import ClientTask, LeftOut, OwnLabel, Target
from protofed.common.config.data import ColumnPartition, Data, data_folder
from protofed.common.config.tables import Frames
from protofed.common.errors import DataError

SEPARATORS = (",", ";", "\t")
# Labels of rows whose label is not one: no class of any run, to be ignored by these names, or mapped.
SEVERAL, NO_LABEL, UNCLEAR = "several labels", "no label", "unclear label"
_OPTIONAL = ("split", "group")
_LABEL = "label "  # what the keys of the columns of several labels begin with
_SUBGROUP = "subgroup "  # likewise of those of `data.subgroup_columns`
_UIDS = ("study", "series", "instance")  # columns of a table whose images a PACS has
_UID = re.compile(r"[0-9][0-9.]{0,63}")  # PS3.5, 9.1; some devices begin a component with 0
_DRIVE = re.compile(r"[A-Za-z]:")
_SEPARATOR_LINE = re.compile(r"sep=([,;\t|])\s*", re.IGNORECASE)
_WORKBOOKS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # how .xlsx and .ods begin, and .xls
_IMAGES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif", ".webp", ".jp2", ".dcm", ".dicom"}) | {
    *(".nii", ".svs", ".ndpi", ".mrxs", ".scn", ".bif", ".vms"),
}
_THREADS = 8  # that read headers
_CORNER = ("x", "y")  # headings of a tile's left and upper edge
MAX_PLACE = 1 << 29  # pixels; no slide is as wide
E = TypeVar("E", bound=FileEntry)
_LISTED = "`protofed client check` lists these images under 'Groups'"


def read_manifest(file: Path, data: Data, *, labelled: bool = True) -> list[FileEntry]:
    """The files that a manifest lists, in its order; empty rows are skipped.

    Args:
        data: names the columns.
        labelled: false: only paths and tiles are read, of images to be classified.

    Raises:
        DataError: the file is missing or no table, a column is missing, or a row is wrong; names the row's number.
    """
    records = _records(file, data, labelled=labelled)
    optional = [name for name in _OPTIONAL if any(cells.get(name) for _, cells in records)]
    needed = [*_places(data), *(["label"] if labelled and not _has_several(data) else [])]
    needed += ["site"] if isinstance(data.partition, ColumnPartition) else []
    needed += _CORNER if data.tile_size is not None else ()
    files, rows = _Files(file.parent, file.parent.resolve()), dict[PacsImage | tuple[Path, str], int]()
    entries = list[FileEntry]()
    for row, cells in records:
        where = f"{file}, row {row}"
        if missing := [name for name in (*needed, *optional) if not cells[name]]:
            raise DataError(f"{where} has no {' and no '.join(missing)}; expected one in every row, or none at all")
        if data.dicomweb is None:
            entry = _entry(row, cells, optional, files, data, where)
        else:
            remote = PacsImage(data.dicomweb, cells["study"], cells["series"], cells["instance"])
            entry = _remote_entry(row, cells, optional, FileEntry(file, f"row {row}", "", remote=remote), data, where)
        key = entry.remote or (entry.path, entry.part)
        if key in rows:
            same, hint = "path", ". Tiles of one image need a tile size"
            if entry.remote or entry.part:
                same, hint = "UIDs" if entry.remote else "path and tile", ""
            raise DataError(f"{where} has the {same} of row {rows[key]}; expected every image once{hint}")
        rows[key] = row
        entries.append(entry)
    return entries


def _entry(
    row: int, cells: Mapping[str, str], optional: Sequence[str], files: _Files, data: Data, where: str
) -> FileEntry:
    name = _name(cells["path"], where)
    path, ambiguous = files.find(name)
    if files.leaves_root(path):
        raise DataError(f"{where}: links lead its path out of the manifest's folder; expected a file in that folder")
    group = cells["group"] if "group" in optional else None
    if data.group_pattern is not None:
        match = re.search(data.group_pattern, normalise(name))
        group = match[1] if match else None
    site = normalise(cells["site"]) if "site" in cells else None
    label, split = _label(cells["label"], data), _split(cells, optional, where)
    own, subgroups = (
        _label_cells(cells, data),
        tuple((name, cells[f"{_SUBGROUP}{name}"]) for name in data.subgroup_columns),
    )
    entry = FileEntry(
        path, name, label, split, group, row, site=site, ambiguous=ambiguous, cells=own, subgroups=subgroups
    )
    return entry if data.tile_size is None else entry.of_part(str(_tile(cells, data.tile_size, where)))


def _places(data: Data) -> Sequence[str]:
    """The columns that each row needs to say where its image is."""
    return ("path",) if data.dicomweb is None else _UIDS[:2]


def _remote_entry(
    row: int, cells: Mapping[str, str], optional: Sequence[str], entry: FileEntry, data: Data, where: str
) -> FileEntry:
    """The entry of an image of a PACS with what its row says: a study is a group, unless the table has groups."""
    for name in _UIDS:
        if cells[name] and not _UID.fullmatch(cells[name]):
            raise DataError(f"{where}: its {name} is no UID; expected digits and points, at most 64. Format it as text")
    group = cells["group" if "group" in optional else "study"]
    site = normalise(cells["site"]) if "site" in cells else None
    label, split = _label(cells["label"], data), _split(cells, optional, where)
    own = _label_cells(cells, data)
    return replace(entry, label=label, split=split, group=group, row=row, site=site, cells=own)


def _label_cells(cells: Mapping[str, str], data: Data) -> tuple[str, ...]:
    """What stands in the label columns, normalised; millions of equal cells are one text in memory."""
    names = [f"{_LABEL}{name}" for name in _label_headings(data)] if _has_several(data) else ["label"]
    return tuple(sys.intern(normalise(cells[name])) for name in names if name in cells)


def _tile(cells: Mapping[str, str], size: int, where: str) -> ImageTile:
    corner = [_number(cells[axis]) for axis in _CORNER]
    whole = [int(number) for number in corner if number is not None and 0 <= number < MAX_PLACE and number % 1 == 0]
    if len(whole) != len(corner):
        raise DataError(
            f"{where}: its x and y are no place in an image; expected whole numbers of pixels of the full resolution, "
            "from 0"
        )
    x, y = whole
    return ImageTile(x, y, size, size)


@dataclass(frozen=True)
class _Files:
    """Finds the files that a table names: by path, or by a name or image id that one file below its folder has."""

    root: Path
    real: Path  # the root, resolved

    def find(self, name: str) -> tuple[Path, bool]:
        """The path, and whether several files have this name; a path that leads nowhere if none has.

        A folder, which is a series, counts where no file has the name.
        """
        archive, _, inner = name.partition("/")  # tables of archives begin with the archive's own folder
        names = [name, *([inner] if inner and archive in (self.root.name, self.real.name) else [])]
        for place in (self.root / name for name in names):
            if _is_there(place):
                return place, False
        if matches := self._by_name.get(normalise(name), ()):
            return self.root / (matches[0] if len(matches) == 1 else name), len(matches) > 1
        return next((self.root / name for name in names if (self.root / name).is_dir()), self.root / name), False

    def leaves_root(self, path: Path) -> bool:
        """Whether links lead a file, or a file of a series' folder, out of the manifest's folder."""
        return any(leaves_root(file, self.real) for file in (path, *_files_in(path)))

    @cached_property
    def _by_name(self) -> Mapping[str, Sequence[str]]:
        """Files by their path and by their name, with and without the suffix of an image; in Unicode's NFC."""
        files: dict[str, list[str]] = {}
        for file in walk(self.root).files:
            path = PurePosixPath(normalise(file))
            short = _without_suffix(path)
            for name in {os.fspath(path), path.name, os.fspath(short), short.name}:
                files.setdefault(name, []).append(file)
        return files


def _files_in(path: Path) -> Sequence[Path]:
    """What is in a folder. A file has nothing in it; nor has a folder that may not be read, whose decoding says why."""
    try:
        return list(path.iterdir()) if path.is_dir() else []
    except OSError:
        return []


def _without_suffix(path: PurePosixPath) -> PurePosixPath:
    """A path without the suffix of an image, if it has one; that of a compressed volume is `.nii.gz`."""
    if path.suffix.lower() == ".gz" and path.stem.lower().endswith(".nii"):
        return path.with_suffix("").with_suffix("")
    return path.with_suffix("") if path.suffix.lower() in _IMAGES else path


def _is_there(path: Path) -> bool:
    return os.path.lexists(path) and not path.is_dir()


def _records(file: Path, data: Data, *, labelled: bool) -> list[tuple[int, Mapping[str, str]]]:
    """Row number and cells, by what they are (path, label, split, group, site), of every row that is not empty."""
    rows = _rows(file)
    first, heading = next(rows, (1, []))
    columns = [_folded(name) for name in heading]
    labels = _label_headings(data) if labelled else ()
    names = {"path": data.path_column} if data.dicomweb is None else {name: name for name in _UIDS}
    another = "; name yours in data.path_column" * (labelled and data.dicomweb is None)
    needed = {names[name]: another for name in _places(data)}
    needed |= dict.fromkeys(labels, "; name yours in data.label_column")
    if labelled:
        names["split"] = "split"
    if labelled and data.group_pattern is None:
        names["group"] = data.group_column or "group"
    if data.group_column is not None:
        needed[data.group_column] = "; name yours in data.group_column"
    if labelled:
        names |= {f"{_SUBGROUP}{name}": name for name in data.subgroup_columns}
        needed |= dict.fromkeys(data.subgroup_columns, "; name yours in data.subgroup_columns")
    if data.tile_size is not None:
        names |= {axis: axis for axis in _CORNER}
        needed |= dict.fromkeys(_CORNER, ", for tiles")
    if isinstance(data.partition, ColumnPartition):
        names["site"] = data.site_column
        needed[data.site_column] = "; name yours in data.site_column"
    _check_heading(columns, needed, names.values(), f"{file}, row {first}")
    records = list[tuple[int, Mapping[str, str]]]()
    for row, cells in rows:
        if len(cells) != len(columns):
            raise DataError(f"{file}, row {row} has {len(cells)} cells; expected {len(columns)}, as the heading has")
        by_column = dict(zip(columns, cells, strict=True))
        by_kind = {kind: by_column.get(_folded(name), "") for kind, name in names.items()}
        by_label = {name: by_column[_folded(name)] for name in labels}
        several = {f"{_LABEL}{name}": cell for name, cell in by_label.items()} if _has_several(data) else {}
        label = _one_hot(by_label) if several else next(iter(by_label.values()), "")
        records.append((row, {**by_kind, **several, "label": label}))
    return records


def _has_several(data: Data) -> bool:
    return not isinstance(data.label_column, str)


def _label_headings(data: Data) -> Sequence[str]:
    return (data.label_column,) if isinstance(data.label_column, str) else data.label_column


def _check_heading(columns: Sequence[str], needed: Mapping[str, str], names: Iterable[str], where: str) -> None:
    """Refuse a column that is there twice, and one of `needed` that is not there; its value says what else to do."""
    # The heading is not quoted: of a table without one it is the first patient's row.
    for name in (*needed, *names):
        if (count := columns.count(_folded(name))) > 1 or (name in needed and not count):
            raise DataError(f"{where}: expected one column '{name}' in the heading{needed.get(name, '')}")


def _folded(name: str) -> str:
    return normalise(name).casefold()


def _rows(file: Path) -> Iterator[tuple[int, Sequence[str]]]:
    """Number and stripped cells of every row that is not empty."""
    row = 0
    try:
        _refuse_workbook(file)
        # utf-8-sig: Excel begins its "CSV UTF-8" with a byte order mark, which would become part of the first heading.
        with file.open(encoding="utf-8-sig", newline="") as stream:
            first = stream.readline()
            match = _SEPARATOR_LINE.fullmatch(first)  # Excel's own way to say it
            if match is None:
                stream.seek(0)
            reader = csv.reader(stream, delimiter=match[1] if match else _separator(first), strict=True)
            for row, cells in enumerate(reader, start=2 if match else 1):
                if any(stripped := [cell.strip() for cell in cells]):
                    yield row, stripped
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}; expected a manifest, a .csv file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8; save it as 'CSV UTF-8'") from error
    except csv.Error as error:
        raise DataError(f"{file}, row {row + 1} cannot be read as a row of a .csv file ({error})") from error


def _refuse_workbook(file: Path) -> None:
    with file.open("rb") as stream:
        if stream.read(4) in _WORKBOOKS:
            raise DataError(
                f"{file} is an Excel workbook. Save its sheet as 'CSV UTF-8', and set data.root to that file"
            )


def _separator(heading: str) -> str:
    """The separator that the heading has most of: Excel's depends on its language."""
    return max(SEPARATORS, key=heading.count)


def _name(cell: str, where: str) -> str:
    """The path below the manifest's folder, with slashes; Windows' backslashes are accepted."""
    path = PurePosixPath(cell.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or _DRIVE.match(cell) or "\0" in cell:
        raise DataError(
            f"{where}: its path leads out of the manifest's folder; expected a path relative to that folder, without .."
        )
    return os.fspath(path)


def _label(cell: str, data: Data) -> str:
    """The label of a cell; of several in one, as NIH's tables have them, `SEVERAL`."""
    label = normalise(cell)
    return SEVERAL if "|" in label and label not in {*map(normalise, data.label_map)} else label


def _one_hot(cells: Mapping[str, str]) -> str:
    """The label whose column has a 1. A row without a clear label gets one that is no class of any run."""
    numbers = {name: _number(cell) for name, cell in cells.items()}
    if not {0.0, 1.0}.issuperset(numbers.values()):
        return UNCLEAR
    labels = [name for name, number in numbers.items() if number]
    return labels[0] if len(labels) == 1 else SEVERAL if labels else NO_LABEL


def _number(cell: str) -> float | None:
    try:
        return float(cell or 0)
    except ValueError:
        return None


def _split(cells: Mapping[str, str], optional: Sequence[str], where: str) -> Split | None:
    if "split" not in optional:
        return None
    if (split := parse_split(cells["split"])) is None:
        raise DataError(f"{where}: its split is none of {', '.join(SPLITS)}")
    return split


@dataclass(frozen=True)
class IndexedFile(FileEntry):
    """An image file with its target in the run, such as its class 0..C-1."""

    target: Target = field(kw_only=True)


@dataclass(frozen=True)
class Scan:
    """All files of a source, in a fixed order: by name, or as in the manifest.

    Attributes:
        items: the files whose label maps to a class of the run.
        ignored: number of files by label, for labels that `data.ignore_labels` names.
        unmapped: number of files by label, for labels that are no class, and in neither `data.label_map` nor
            `data.ignore_labels`.
        misplaced: names of files outside of any class folder; they count as unreadable.
        ungrouped: items that `data.group_pattern` does not match; `check` refuses any.
        crossing: items of groups that are in both train and test of the files' own split; `check` refuses any.
        ambiguous: items of whose name there are several files; `check` refuses any.
        left_out: names of files and folders that their name tells to be no images, or deleted ones.
        labels: maps the site's labels to the run's classes.
    """

    items: Sequence[IndexedFile]
    ignored: Counter[str]
    unmapped: Counter[str]
    misplaced: Sequence[str]
    ungrouped: Sequence[IndexedFile]
    crossing: Sequence[IndexedFile]
    ambiguous: Sequence[IndexedFile]
    left_out: Sequence[str]
    labels: LabelMap

    def check(self) -> None:
        """Check that the items can be used.

        Raises:
            DataError: there are unmapped labels (the text names each, with the nearest class), or ungrouped, crossing
                or ambiguous items.
        """
        self.labels.check(self.unmapped)
        if self.ungrouped:
            raise DataError(
                f"data.group_pattern does not match the paths of all images; expected one (group) in each. {_LISTED}"
            )
        if self.crossing:
            groups, rows = len({item.group for item in self.crossing}), [item.row for item in self.crossing]
            where = "" if None in rows else f" (the first in row {rows[0]})"
            raise DataError(f"{groups} groups are in both train and test{where}; expected each on one side. {_LISTED}")
        if self.ambiguous:
            raise DataError(
                f"row {self.ambiguous[0].row} of the manifest gives a name that several files below its folder "
                "have; expected one. Write the path with its folders. `protofed client check` lists the others"
            )

    def usable(self) -> list[IndexedFile]:
        """The items but those that `check` refuses: with noise a site leaves each of these out by itself."""
        refused = {item.name for item in (*self.ungrouped, *self.crossing, *self.ambiguous)}
        return [item for item in self.items if item.name not in refused]


def scan(
    data: Data, class_names: Sequence[str], classes: int, frames: Frames = "one", task: ClientTask | None = None
) -> Scan:
    """List the examples of a source `folder` or `manifest` and map their labels.

    Headers are read where `frames` may give several examples a file; otherwise no file is opened. Where a file may give
    several examples and the data have no groups, the file or series itself is the group: its examples stay together.

    Unmapped labels and wrong groups are no errors here, so that `protofed client check` can show all of them at once;
    `Scan.check` refuses them.

    Args:
        class_names: the run's class names, in the order of their indices.
        classes: C.
        frames: the run's `input.frames`.
        task: what the labels are read as; None: classes.

    Raises:
        DataError: no root, no class_names, a manifest with wrong rows, paths or links that lead out of the root; or a
            library is not installed, which a header needs.
    """
    if not class_names or len(class_names) != classes:
        raise DataError(
            f"the recipe has no `class_names`, which source {data.source} needs: name each class or finding, or "
            'the number, as ["age"]'
        )
    if task is None:
        from protofed.client.tasks.classification import CLASSES  # with PyTorch, without which images can be listed

        task = CLASSES
    labels = LabelMap.of(data, class_names)
    columns = tuple(map(normalise, _label_headings(data))) if _has_several(data) and data.source != "folder" else ()
    listing = list_files(data)
    mapped, others = list[IndexedFile](), Counter[LeftOut]()
    for entry in listing.entries:
        target = task.read(OwnLabel(entry.label, entry.cells, columns), labels)
        if isinstance(target, LeftOut):
            others[target] += 1
        else:
            mapped.append(IndexedFile(**vars(entry), target=target))
    if data.tile_size is not None or gives_several(frames):
        mapped = _grouped_by_file(mapped, data)
    items = list(expand_parts(mapped, frames))
    ignored, unmapped = (
        Counter({label: files for (label, is_ignored), files in others.items() if is_ignored is wanted})
        for wanted in (True, False)
    )
    return Scan(
        items=items,
        ignored=ignored,
        unmapped=unmapped,
        misplaced=listing.misplaced,
        ungrouped=[item for item in items if data.group_pattern is not None and item.group is None],
        crossing=[] if data.merge_test_into_train else _crossing(items),
        ambiguous=[item for item in items if item.ambiguous],
        left_out=listing.left_out,
        labels=labels,
    )


def _grouped_by_file(entries: list[IndexedFile], data: Data) -> list[IndexedFile]:
    """The entries, each file or series a group of its own where the data have no groups."""
    if data.group_pattern is not None or any(entry.group is not None for entry in entries):
        return entries
    root = _root(data)
    top = root if root.is_dir() else root.parent  # not the path itself: no group may change where a folder is moved
    return [replace(entry, group=normalise(entry.path.relative_to(top).as_posix())) for entry in entries]


def expand_parts(entries: Sequence[E], frames: Frames) -> Iterator[E]:
    """Each entry's examples by the run's rule, in order; an entry of a tile is one already.

    Headers are read where `frames` may give several examples a file.

    Raises:
        DataError: a library is not installed, which a header needs.
    """
    if not gives_several(frames):
        yield from entries
        return
    with silence_decoders(), ThreadPoolExecutor(_THREADS) as pool:
        for entry, parts in zip(entries, pool.map(partial(_list_parts, frames=frames), entries), strict=True):
            yield from map(entry.of_part, parts)


def _list_parts(entry: FileEntry, frames: Frames) -> Sequence[str]:
    if entry.remote is not None:
        return dicomweb.list_parts(entry.remote, frames)
    return ("",) if entry.part else list_parts(entry.path, frames)


def as_picture(entry: FileEntry) -> StoredPicture:
    """What decodes an entry."""
    if entry.remote is not None:
        return dicomweb.PacsPicture(entry.remote, entry.part)
    return FilePicture(entry.path, entry.part)


def list_files(data: Data) -> Listing:
    """All files of a source `folder` or `manifest` with their own labels.

    Raises:
        DataError: as `scan`, except for labels.
    """
    root = _root(data)
    if data.source == "folder":
        by_site = isinstance(data.partition, ColumnPartition)
        return folder.read(root, data.group_pattern, by_site=by_site, series=data.series is not None)
    dicomweb.forget_headers()
    return Listing(read_manifest(root, data))


def _root(data: Data) -> Path:
    """The folder of images, or the manifest."""
    root = with_root(data).root
    if root is None:
        what = "folder with a folder of images for each class" if data.source == "folder" else "manifest, a .csv file"
        raise DataError(f"source {data.source} has no data.root; set it to the {what}")
    return root


def with_root(data: Data) -> Data:
    """`data` with its root resolved: a relative or missing one is in the folder that `PROTOFED_DATA` names, if set.

    Raises:
        DataError: it is neither a folder nor a file.
    """
    root = data.place or data_folder()
    if root is not None and root.exists() and not (root.is_dir() or root.is_file()):  # opening a pipe would never end
        raise DataError(f"{root} is neither a folder nor a file; correct data.root")
    return data.model_copy(update={"root": root})


def _crossing(items: Sequence[IndexedFile]) -> list[IndexedFile]:
    """The items of groups in both train and test, in the order of `items`."""
    train, test = ({item.group for item in items if item.split == split} for split in ("train", "test"))
    both = train & test - {None}  # items without a group cross nothing
    return [item for item in items if item.split in ("train", "test") and item.group in both]
