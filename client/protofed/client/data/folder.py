"""Images in a folder for each class: `root/class/...`, or `root/{train,val,test}/class/...`; the path says it all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from protofed.client.data.file_entry import SPLITS, FileEntry, Split, leads_out
from protofed.client.data.labels import plain
from protofed.common.errors import DataError

# What systems leave in folders, by its name in small letters; names that begin with a point are left out, too.
_LEFTOVERS = frozenset(
    {"thumbs.db", "ehthumbs.db", "desktop.ini", "dicomdir", "__macosx", "@eadir", "lost+found", "$recycle.bin"}
    | {"system volume information", "icon\r"}
)


def read(root: Path, group: str | None) -> tuple[list[FileEntry], list[str]]:
    """All files below a folder, sorted by name.

    Args:
        group: regex with one (group), sought in each file's path below the root.

    Returns:
        What lies in a class's folder, at any depth, and the names of what does not.

    Raises:
        DataError: no such folder, a folder that cannot be read, links out of it, a split beside class folders.
    """
    if not root.is_dir():
        raise DataError(f"there is no folder {root}; expected one with a folder of images for each class")
    has_splits = _has_splits(root)
    entries, astray = list[FileEntry](), list[str]()
    for name in sorted(files(root)):
        *folders, _ = name.split("/")
        split: Split | None = next((one for one in SPLITS if has_splits and folders[:1] == [one]), None)
        if len(folders) < 1 + has_splits:
            astray.append(plain(name))
            continue
        label = plain(folders[has_splits])
        entries.append(FileEntry(root / name, plain(name), label, split, _group(name, group)))
    return entries, astray


def files(root: Path) -> Iterator[str]:
    """Paths below the root, in no order; what systems leave in folders, and what is hidden, is left out.

    Raises:
        DataError: a folder that cannot be read, links out of the root.
    """
    real, outside = root.resolve(), 0

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read a folder in {root}: {error.strerror}; make it readable for this user") from error

    for folder, folders, names in os.walk(root, onerror=fail):
        here = Path(folder)
        folders[:] = [name for name in folders if not _left_over(name)]
        outside += sum((here / name).is_symlink() for name in folders)  # nor into it: its files would count twice
        for name in names:
            if not _left_over(name):
                outside += leads_out(here / name, real)
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
    known = folders & set(SPLITS)
    if known and folders - known:
        raise DataError(
            f"{root} has a folder '{min(known)}' beside {len(folders - known)} others; expected train, val and test "
            "with a folder for each class in them, or folders of classes alone"
        )
    return bool(known)


def _left_over(name: str) -> bool:
    return name.startswith(".") or name.lower() in _LEFTOVERS


def _group(name: str, pattern: str | None) -> str | None:
    found = re.search(pattern, name) if pattern is not None else None
    return found[1] if found else None
