"""An image file that a site has, with the site's own label for it; and the errors for files that cannot be used."""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, Self, TypeAlias, get_args

from protofed.common.config.data import DicomWeb
from protofed.common.errors import DataError

MAX_PIXELS = 100_000_000  # of one image as stored: a larger one is a decompression bomb, or a whole slide
MAX_FILE_BYTES = 1 << 30
DIGEST_BYTES = 16


class UnreadableImageError(DataError):
    """A file that is not an image that the run can use. Its text is the reason; it names neither file nor content."""


class TooManyUnreadableError(DataError):
    """More unreadable files than `data.max_unreadable_fraction` allows; the text, which is logged, names none of them.

    Attributes:
        files: name and reason of each.
    """

    def __init__(self, message: str, files: Sequence[tuple[str, str]]) -> None:
        super().__init__(message)
        self.files = files


Split: TypeAlias = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
_SPLIT_NAMES: Mapping[str, Split] = {
    **{name: name for name in SPLITS},
    "training": "train",
    "valid": "val",
    "validation": "val",
    "testing": "test",
}


class PacsImage(NamedTuple):
    """An instance of a PACS, or a series, by its UIDs.

    Attributes:
        instance: empty: the series is one volume.
    """

    pacs: DicomWeb
    study: str
    series: str
    instance: str = ""


@dataclass(frozen=True)
class FileEntry:
    """An image file, a part of one, or the folder of a DICOM series; or an image of a PACS. It is not opened yet.

    Attributes:
        name: its path below the root (of a manifest: below the manifest's folder), with slashes; then its part, if
            it is one, as "a/b.dcm, frame 12".
        label: the site's own label, normalised.
        split: as the site's files are split; None: they are not.
        group: examples of one group, such as a patient, stay together; None: there are no groups. Not in the repr,
            as it may identify a patient.
        row: of a manifest, as a spreadsheet counts (the heading is row 1); None: not from a manifest.
        site: whose it is, where the source has several sites' files; None: the source does not say.
        ambiguous: several files have the name that a manifest gives.
        part: which example of the file this is, as of `volumes`: "frame 12", or "tile 512,1024,256,256"; empty: the
            image that the run's rule takes from the whole file.
        remote: the image of a PACS; `path` is then the manifest that lists it, and `name` its row. None: a file. Not
            in the repr, as UIDs may identify a patient.
        cells: what a manifest has in its label columns; of a folder none.
        subgroups: heading and cell of a manifest's columns of `data.subgroup_columns`. Not in the repr: of a patient.
    """

    path: Path
    name: str
    label: str
    split: Split | None = None
    group: str | None = field(default=None, repr=False)
    row: int | None = None
    site: str | None = None
    ambiguous: bool = False
    part: str = ""
    remote: PacsImage | None = field(default=None, repr=False)
    cells: tuple[str, ...] = ()
    subgroups: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def of_part(self, part: str) -> Self:
        """The entry of one part of this file; an empty part is the file itself."""
        return replace(self, part=part, name=f"{self.name}, {part}") if part else self


@dataclass(frozen=True)
class Listing:
    """All files of a source, none of them opened.

    Attributes:
        entries: the files that have a label.
        misplaced: names of files outside of any class folder.
        left_out: names of files and folders that their name tells to be no images, or deleted ones.
    """

    entries: Sequence[FileEntry]
    misplaced: Sequence[str] = ()
    left_out: Sequence[str] = ()


def normalise(name: str) -> str:
    """A label in the form in which labels are compared: stripped, in Unicode's NFC.

    Bytes of a file name that are not UTF-8 become backslash escapes. Some file systems store names decomposed:
    without NFC, an umlaut from there would not equal the one in the recipe.
    """
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return unicodedata.normalize("NFC", text).strip()


def digest_content(path: Path) -> str:
    """BLAKE2b of a file's bytes, or of the files of a folder, in hex; of a pipe, which would never end, of none.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    if path.is_dir():
        for inner in sorted(path.iterdir()):
            digest.update(digest_content(inner).encode() if inner.is_file() else b"")
    elif path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: digest).hexdigest()
    return digest.hexdigest()


def parse_split(name: str) -> Split | None:
    """The split that a folder's name, or a table's cell, means in any of its usual spellings; None: none."""
    return _SPLIT_NAMES.get(name.casefold())


def leaves_root(path: Path, root: Path) -> bool:
    """Whether links lead `path` out of `root`, which is resolved itself."""
    return not Path(os.path.realpath(path)).is_relative_to(root)  # unlike `resolve`, bears a link to itself
