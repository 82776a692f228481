"""The source `folder`: images in a folder for each class, with splits and sites above it, or not.

`root/class/...` or `root/{train,val,test}/class/...`; cut by the column of sites, `root/site/` before either.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from protofed.client.data.file_entry import FileEntry, Listing, Split, leaves_root, normalise, parse_split
from protofed.common.errors import DataError

# Names, in lower case, that operating systems and servers leave in folders; hidden names are left out, too.
_LEFTOVERS = frozenset(
    {"thumbs.db", "ehthumbs.db", "desktop.ini", "dicomdir", "icon\r", "__macosx", "lost+found", "found.000"}
    | {"system volume information", "network trash folder", "temporary items"}
    # What people deleted: at Windows, QNAP and Synology. An image there would be an example again.
    | {
        "$recycle.bin",
        "recycler",
        "recycled",
        "@recycle",
        "#recycle",
        "@recently-snapshot",
        "#snapshot",
        "~snapshot",
        "@eadir",
    }
)
# A file with such a suffix is no image. Any other one is opened: DICOM files often have none, or part of a UID.
_NO_IMAGES = frozenset(
    [
        "txt",
        "csv",
        "tsv",
        "json",
        "jsonl",
        "xml",
        "md",
        "rst",
        "pdf",
        "ini",
        "cfg",
        "toml",
        "yaml",
        "yml",
        "log",
        "html",
        "htm",
        "db",
        "sqlite",
        "rtf",
        "doc",
        "docx",
        "odt",
        "xls",
        "xlsx",
        "ods",
        "ppt",
        "pptx",
        "zip",
        "gz",
        "tar",
        "tgz",
        "7z",
        "rar",
        "py",
        "ipynb",
        "sh",
        "bat",
        "exe",
        "lnk",
        "url",
        "tmp",
        "part",
        "crdownload",
        "identifier",  # `x.png:Zone.Identifier`, which Windows' files get when they are copied
    ]
)


def read(root: Path, group: str | None, *, by_site: bool = False, series: bool = False) -> Listing:
    """All files below `root`, sorted by name.

    Args:
        group: regex with one (group), searched in each file's path below the root, or below its site's folder.
        by_site: the first folders are sites, each read as a root: patients of two sites are two, whatever their name.
        series: the files of each folder below a class's folder are one entry, whose path is that folder.

    Raises:
        DataError: no such folder, a folder that cannot be read, links out of it, a split beside class folders.
    """
    if not root.is_dir():
        raise DataError(f"there is no folder {root}; expected one with a folder of images for each class")
    tree = walk(root)
    tree.check(root)
    entries, misplaced = list[FileEntry](), list[str]()
    if by_site:
        _check_sites(root)
    for site, names in _sites(sorted(tree.files)) if by_site else [(None, sorted(tree.files))]:
        has_splits = _has_splits(root if site is None else root / site)
        for name in names:
            entry = _entry(root, name, site, group, has_splits=has_splits)
            entries += [entry] if entry is not None else []
            misplaced += [normalise(name)] if entry is None else []
    _check_below_classes(root, entries)
    if series:  # files that lie in a class's folder itself stay images of their own
        entries = _by_folder(entries, {entry.path.parent for entry in entries if len(_below_class(root, entry)) > 1})
    return Listing(entries, misplaced, tree.left_out)


def read_unlabelled(root: Path, *, series: bool = False) -> list[FileEntry]:
    """All files below `root` at any level, sorted by name: images to be classified, whose labels nobody knows.

    Args:
        series: the files of each folder are one entry, whose path is that folder; so are those of `root` itself.

    Raises:
        DataError: a folder cannot be read, or links lead out of it.
    """
    tree = walk(root)
    tree.check(root)
    entries = [FileEntry(root / name, name, label="") for name in sorted(tree.files)]
    return _by_folder(entries, {entry.path.parent for entry in entries}) if series else entries


def _by_folder(entries: Sequence[FileEntry], series: Set[Path]) -> list[FileEntry]:
    """One entry for the files of each of the folders `series`; other files stay as they are.

    A folder whose files are of several groups has none: `image_files.Scan.check` refuses it.
    """
    folders = dict[Path, FileEntry]()
    for entry in entries:
        folder = entry.path.parent
        if folder not in series:
            folders[entry.path] = entry
            continue
        name = entry.name.rpartition("/")[0] or folder.resolve().name
        first = folders.setdefault(folder, replace(entry, path=folder, name=name))
        if first.group != entry.group:
            folders[folder] = replace(first, group=None)
    return list(folders.values())


def _below_class(root: Path, entry: FileEntry) -> tuple[str, ...]:
    """The parts of a file's path below its class's folder, the last of which is its name."""
    return entry.path.relative_to(root).parts[1 + (entry.site is not None) + (entry.split is not None) :]


@dataclass(frozen=True)
class Tree:
    """What is below a folder, unordered, by relative path.

    Attributes:
        files: that may be images.
        left_out: files and folders that are left out by their name, as of `Listing`.
        outside: number of links that lead out of it, or to another folder.
    """

    files: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    outside: int = 0

    def check(self, root: Path) -> None:
        """Refuse links that lead out.

        Raises:
            DataError: there is one.
        """
        if self.outside:
            links = "a link leads" if self.outside == 1 else f"{self.outside} links lead"
            raise DataError(
                f"{root}: {links} out of this folder, or to another folder; expected image files, or links to "
                "image files in this folder"
            )


def walk(root: Path) -> Tree:
    """List what is below `root`; no file is opened, and nothing that is left out is entered.

    Raises:
        DataError: a folder cannot be read.
    """
    real, outside = root.resolve(), 0
    files, left_out = list[str](), list[str]()

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read a folder in {root}: {error.strerror}; make it readable for this user") from error

    for folder, folders, names in os.walk(root, onerror=fail):
        here = Path(folder)
        left_out += [_below(root, here / name) for name in folders if _left_over(name)]
        folders[:] = [name for name in folders if not _left_over(name)]
        # Links to folders are refused even within the root: their files would count twice.
        outside += sum((here / name).is_symlink() for name in folders)
        for name in names:
            if not is_image(name):
                left_out.append(_below(root, here / name))
                continue
            outside += leaves_root(here / name, real)
            files.append((here / name).relative_to(root).as_posix())
    return Tree(files, sorted(left_out), outside)


def _below(root: Path, path: Path) -> str:
    return normalise(path.relative_to(root).as_posix())


def _sites(names: Sequence[str]) -> Iterable[tuple[str | None, Iterable[str]]]:
    """Each site with its files' names; files beside the sites' folders come as those of no site."""
    return groupby(names, lambda name: name.split("/")[0] if "/" in name else None)


def _entry(root: Path, name: str, site: str | None, group: str | None, *, has_splits: bool) -> FileEntry | None:
    """The file of this name; None: it is in no class's folder."""
    below = name if site is None else name[len(site) + 1 :]
    *folders, _ = below.split("/")
    if len(folders) < 1 + has_splits:
        return None
    split: Split | None = parse_split(folders[0]) if has_splits else None
    of_group, of_site = _group(normalise(below), group), None if site is None else normalise(site)
    if of_site is not None and of_group is not None:
        of_group = f"{of_site}/{of_group}"
    return FileEntry(root / name, normalise(name), normalise(folders[has_splits]), split, of_group, site=of_site)


def _has_splits(root: Path) -> bool:
    """Whether the folders are train, val and test, or some of them, in place of classes.

    Other spellings than these three may be classes (`valid` beside `invalid`): two different ones are splits, or one
    that has nothing beside it and is no `valid`.
    """
    folders = _folders(root)
    splits = {name: split for name in folders if (split := parse_split(name)) is not None}
    meant = set(splits.values())
    if not splits or (meant == {"val"} and "val" not in splits):
        return False
    if len(splits) < len(folders):
        if len(meant) < 2 and not meant & splits.keys():
            return False
        raise DataError(
            f"{root} has a folder '{min(splits)}' beside {len(folders) - len(splits)} others. Expected train, val "
            "and test, each with a folder for each class; or only folders of classes. Move or rename the others"
        )
    if len(splits) > len(meant):
        raise DataError(
            f"{root} has two folders for one split among {', '.join(sorted(splits))}; expected one: put them together"
        )
    return True


def _check_below_classes(root: Path, entries: Sequence[FileEntry]) -> None:
    """Refuse splits within the folders of classes: without a word the site would train on its own test images."""
    meant = set[Split | None]()
    for entry in entries:
        meant |= {parse_split(name) for name in _below_class(root, entry)[:-1][:1]}
    if {"train", "test"} <= meant:
        raise DataError(
            f"{root} has folders of splits in the folders of classes. Expected train and test at the top, each with "
            "a folder for each class. Move the images"
        )


def _check_sites(root: Path) -> None:
    """Check that the first folders are no splits, and that all of them have splits, or none."""
    sites = sorted(_folders(root))
    if splits := [name for name in sites if parse_split(name) is not None]:
        raise DataError(
            f"{root} has a folder '{splits[0]}' where partition 'column' expects sites. Expected SITE/CLASS or "
            "SITE/train/CLASS. Move the splits into the folders of the sites"
        )
    if len({_has_splits(root / name) for name in sites}) > 1:
        raise DataError(f"{root}: only some sites have folders train and test; expected them at every site, or at none")


def _folders(root: Path) -> list[str]:
    try:
        return [entry.name for entry in root.iterdir() if entry.is_dir() and not _left_over(entry.name)]
    except OSError as error:
        raise DataError(f"cannot read {root}: {error.strerror}; make it readable for this user") from error


def is_image(name: str) -> bool:
    """Whether a file of this name is opened: systems leave no such file behind, and its suffix may be an image's."""
    return not _left_over(name) and (name.lower().endswith(".nii.gz") or not _no_image(name))


def _left_over(name: str) -> bool:
    return name.startswith(".") or name.lower() in _LEFTOVERS


def _no_image(name: str) -> bool:
    _, dot, suffix = name.rpartition(".")
    return bool(dot) and suffix.lower() in _NO_IMAGES


def _group(name: str, pattern: str | None) -> str | None:
    match = re.search(pattern, name) if pattern is not None else None
    return match[1] if match else None
