"""The image files of the sources `folder` and `manifest`: names, labels and groups, without opening a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from protofed.client.data import folder, manifest
from protofed.client.data.file_entry import FileEntry, Listing
from protofed.client.data.labels import LabelMap
from protofed.common.config.data import ColumnPartition, Data, data_folder
from protofed.common.errors import DataError


@dataclass(frozen=True)
class IndexedFile(FileEntry):
    """An image file with its class in the run: `index`, 0..C-1."""

    index: int = field(kw_only=True)


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
                "data.group_pattern does not match the paths of all images; expected one (group) in each: `protofed "
                "client check` lists the others"
            )
        if self.crossing:
            groups, rows = len({item.group for item in self.crossing}), [item.row for item in self.crossing]
            where = "" if None in rows else f" (the first in row {rows[0]})"
            raise DataError(
                f"{groups} groups are in both train and test{where}; expected each on one side: "
                "`protofed client check` lists their images"
            )
        if self.ambiguous:
            raise DataError(
                f"row {self.ambiguous[0].row} of the manifest gives a name that several files below its folder have; "
                "expected one: write the path with its folders; `protofed client check` lists the others"
            )

    def usable(self) -> list[IndexedFile]:
        """The items but those that `check` refuses: with noise a site leaves each of these out by itself."""
        refused = {item.name for item in (*self.ungrouped, *self.crossing, *self.ambiguous)}
        return [item for item in self.items if item.name not in refused]


def scan(data: Data, class_names: Sequence[str], classes: int) -> Scan:
    """List the files of a source `folder` or `manifest` and map their labels; no file is opened.

    Unmapped labels and wrong groups are no errors here, so that `protofed client check` can show all of them at once;
    `Scan.check` refuses them.

    Args:
        class_names: the run's class names, in the order of their indices.
        classes: C.

    Raises:
        DataError: no root, no class_names, a manifest with wrong rows, paths or links that lead out of the root.
    """
    if not class_names or len(class_names) != classes:
        raise DataError(
            f"the recipe has no `class_names`: labels of source {data.source} are names, and the run must name its own"
        )
    labels = LabelMap.of(data, class_names)
    listing = list_files(data)
    items = [_item(entry, labels.classes[entry.label]) for entry in listing.entries if entry.label in labels.classes]
    rest = [entry.label for entry in listing.entries if entry.label not in labels.classes]
    return Scan(
        items=items,
        ignored=Counter(label for label in rest if label in labels.ignored),
        unmapped=Counter(label for label in rest if label not in labels.ignored),
        misplaced=listing.misplaced,
        ungrouped=[item for item in items if data.group_pattern is not None and item.group is None],
        crossing=[] if data.merge_test_into_train else _crossing(items),
        ambiguous=[item for item in items if item.ambiguous],
        left_out=listing.left_out,
        labels=labels,
    )


def list_files(data: Data) -> Listing:
    """All files of a source `folder` or `manifest` with their own labels.

    Raises:
        DataError: as `scan`, except for labels.
    """
    root = with_root(data).root
    if root is None:
        what = "folder with a folder of images for each class" if data.source == "folder" else "manifest, a .csv file"
        raise DataError(f"source {data.source} has no data.root; set it to the {what}")
    if data.source == "folder":
        return folder.read(root, data.group_pattern, by_site=isinstance(data.partition, ColumnPartition))
    return Listing(manifest.read(root, data))


def with_root(data: Data) -> Data:
    """`data` with its root resolved: a relative or missing one is in the folder that `PROTOFED_DATA` names, if set.

    Raises:
        DataError: it is neither a folder nor a file.
    """
    root = data.place or data_folder()
    if root is not None and root.exists() and not (root.is_dir() or root.is_file()):  # opening a pipe would never end
        raise DataError(f"{root} is neither a folder nor a file; correct data.root")
    return data.model_copy(update={"root": root})


def _item(entry: FileEntry, index: int) -> IndexedFile:
    return IndexedFile(**vars(entry), index=index)


def _crossing(items: Sequence[IndexedFile]) -> list[IndexedFile]:
    """The items of groups in both train and test, in the order of `items`."""
    train, test = ({item.group for item in items if item.split == split} for split in ("train", "test"))
    both = train & test - {None}  # items without a group cross nothing
    return [item for item in items if item.split in ("train", "test") and item.group in both]
