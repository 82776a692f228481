"""What image files a site has, without looking at a pixel: the sources `folder` and `manifest`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from protofed.client.data import folder, manifest
from protofed.client.data.file_entry import FileEntry
from protofed.client.data.labels import LabelMap
from protofed.common.config.data import Data, common_folder
from protofed.common.errors import DataError


@dataclass(frozen=True)
class IndexedFile(FileEntry):
    """One image file, not opened yet; `index` is the run's class, 0..C-1."""

    index: int = field(kw_only=True)


@dataclass(frozen=True)
class Scan:
    """What there is, in a fixed order: by name, or as the manifest has it.

    Attributes:
        items: all that have a class of the run.
        ignored: files by own label, left out because `data.ignore_labels` names it.
        unmapped: files by own label that is no class and in neither `data.label_map` nor `data.ignore_labels`.
        astray: files in no class folder, by name below the root; they count as unreadable.
        ungrouped: items that `data.group_pattern` does not match; one is too many.
        crossing: items of groups that are in both train and test of the files' own split; one is too many.
        labels: what the site's labels mean.
    """

    items: Sequence[IndexedFile]
    ignored: Counter[str]
    unmapped: Counter[str]
    astray: Sequence[str]
    ungrouped: Sequence[IndexedFile]
    crossing: Sequence[IndexedFile]
    labels: LabelMap

    def check(self) -> None:
        """That the items can be used as they are.

        Raises:
            DataError: labels that are unmapped (all by name, each with its nearest class), ungrouped or crossing items.
        """
        self.labels.check(self.unmapped)
        if self.ungrouped:
            raise DataError(
                f"data.group_pattern does not match the paths of {len(self.ungrouped)} images; expected one (group) "
                "in each: `protofed client check` lists them"
            )
        if self.crossing:
            groups, rows = len({item.group for item in self.crossing}), [item.row for item in self.crossing]
            where = "" if None in rows else f" (the first in row {rows[0]})"
            raise DataError(
                f"{groups} groups are in both train and test{where}; expected each on one side: "
                "`protofed client check` lists their images"
            )


def scan(data: Data, class_names: Sequence[str], classes: int) -> Scan:
    """What a source `folder` or `manifest` holds; pixels are left to `decode`.

    It answers also where labels are unmapped or groups wrong, so that all of it can be shown at once: `Scan.check`
    refuses them.

    Args:
        class_names: the run's classes by name, 0..classes - 1.

    Raises:
        DataError: no root, no class_names, a manifest with wrong rows, paths or links that lead out of the root.
    """
    if not class_names or len(class_names) != classes:
        raise DataError(
            f"the recipe has no `class_names`: labels of source {data.source} are names, and the run must name its own"
        )
    labels = LabelMap.of(data, class_names)
    entries, astray = listed(data)
    items = [_item(entry, labels.classes[entry.label]) for entry in entries if entry.label in labels.classes]
    rest = [entry.label for entry in entries if entry.label not in labels.classes]
    return Scan(
        items=items,
        ignored=Counter(label for label in rest if label in labels.ignored),
        unmapped=Counter(label for label in rest if label not in labels.ignored),
        astray=astray,
        ungrouped=[item for item in items if data.group_pattern is not None and item.group is None],
        crossing=[] if data.merge_test_into_train else _crossing(items),
        labels=labels,
    )


def listed(data: Data) -> tuple[list[FileEntry], list[str]]:
    """All files of a source `folder` or `manifest` with their own labels, and those that lie astray.

    Raises:
        DataError: as `scan`, but for labels.
    """
    root = rooted(data).root
    if root is None:
        what = "folder with a folder of images for each class" if data.source == "folder" else "manifest, a .csv file"
        raise DataError(f"source {data.source} has no data.root; set it to the {what}")
    return folder.read(root, data.group_pattern) if data.source == "folder" else (manifest.read(root), [])


def rooted(data: Data) -> Data:
    """With a root that is relative, or not given, in the folder that `PROTOFED_DATA` names, if it names one."""
    return data.model_copy(update={"root": data.place or common_folder()})


def _item(entry: FileEntry, index: int) -> IndexedFile:
    return IndexedFile(**vars(entry), index=index)


def _crossing(items: Sequence[IndexedFile]) -> list[IndexedFile]:
    """In items' order; what is in no group crosses nothing."""
    train, test = ({item.group for item in items if item.split == split} for split in ("train", "test"))
    both = train & test - {None}
    return [item for item in items if item.split in ("train", "test") and item.group in both]
