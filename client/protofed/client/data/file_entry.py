"""An image file that a site has, with the site's own label for it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

Split: TypeAlias = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class FileEntry:
    """An image file, not opened yet.

    Attributes:
        name: its path below the root (of a manifest: below the manifest's folder), with slashes.
        label: the site's own label, normalised.
        split: as the site's files are split; None: they are not.
        group: examples of one group, such as a patient, stay together; None: there are no groups. Not in the repr,
            as it may identify a patient.
        row: of a manifest, as a spreadsheet counts (the heading is row 1); None: not from a manifest.
    """

    path: Path
    name: str
    label: str
    split: Split | None = None
    group: str | None = field(default=None, repr=False)
    row: int | None = None


def leaves_root(path: Path, root: Path) -> bool:
    """Whether links lead `path` out of `root`, which is resolved itself."""
    return not Path(os.path.realpath(path)).is_relative_to(root)  # unlike `resolve`, bears a link to itself
