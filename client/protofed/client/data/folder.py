"""The source `folder`: images in a folder for each class, `root/class/...` or `root/{train,val,test}/class/...`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from protofed.client.data.file_entry import SPLITS, FileEntry, Split, leaves_root
from protofed.client.data.labels import normalise
from protofed.common.errors import DataError

# Names, in lower case, that operating systems and servers leave in folders; hidden names are left out, too.
_LEFTOVERS = frozenset(
    {"thumbs.db", "ehthumbs.db", "desktop.ini", "dicomdir", "__macosx", "@eadir", "lost+found", "$recycle.bin"}
    | {"system volume information", "icon\r"}
)


def read(root: Path, group: str | None) -> tuple[list[FileEntry], list[str]]:
    """All files below `root`, sorted by name.

    Args:
        group: regex with one (group), searched in each file's path below the root.

    Returns:
        The files in class folders, at any depth, and the names of files outside of any.

    Raises:
        DataError: no such folder, a folder that cannot be read, links out of it, a split beside class folders.
    """
    if not root.is_dir():
        raise DataError(f"there is no folder {root}; expected one with a folder of images for each class")
    has_splits = _has_splits(root)
    entries, misplaced = list[FileEntry](), list[str]()
    for name in sorted(files(root)):
        *folders, _ = name.split("/")
        split: Split | None = next((split for split in SPLITS if has_splits and folders[:1] == [split]), None)
        if len(folders) < 1 + has_splits:
            misplaced.append(normalise(name))
            continue
        label = normalise(folders[has_splits])
        entries.append(FileEntry(root / name, normalise(name), label, split, _group(name, group)))
    return entries, misplaced


def files(root: Path) -> Iterator[str]:
    """Paths of files below `root`, relative and unordered, without hidden ones and `_LEFTOVERS`.

    Raises:
        DataError: a folder that cannot be read, links out of the root.
    """
    real, outside = root.resolve(), 0

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read a folder in {root}: {error.strerror}; make it readable for this user") from error

    for folder, folders, names in os.walk(root, onerror=fail):
        here = Path(folder)
        folders[:] = [name for name in folders if not _left_over(name)]
        # Links to folders are refused even within the root: their files would count twice.
        outside += sum((here / name).is_symlink() for name in folders)
        for name in names:
            if not _left_over(name):
                outside += leaves_root(here / name, real)
                yield (here / name).relative_to(root).as_posix()
    if outside:
        raise DataError(
            f"{root}: {outside} links lead out of it or to another folder; expected the files themselves, or links to "
            "files in it"
        )


def _has_splits(root: Path) -> bool:
    """Whether the folders are train, val and test, or some of them, in place of classes."""
    try:
        folders = {entry.name for entry in root.iterdir() if entry.is_dir() and not _left_over(entry.name)}
    except OSError as error:
        raise DataError(f"cannot read {root}: {error.strerror}; make it readable for this user") from error
    splits = folders & set(SPLITS)
    if splits and folders - splits:
        raise DataError(
            f"{root} has a folder '{min(splits)}' beside {len(folders - splits)} others; expected train, val and test "
            "with a folder for each class in them, or folders of classes alone"
        )
    return bool(splits)


def _left_over(name: str) -> bool:
    return name.startswith(".") or name.lower() in _LEFTOVERS


def _group(name: str, pattern: str | None) -> str | None:
    match = re.search(pattern, name) if pattern is not None else None
    return match[1] if match else None
