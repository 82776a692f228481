"""One line of what a site has, before anybody asks what its label means."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

Split: TypeAlias = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class FileEntry:
    """A file and what the site says of it.

    Attributes:
        path: where it lies.
        name: its path below the root (of a manifest: below the manifest's folder), with slashes.
        label: the site's own.
        split: the files' own; None: they have none.
        group: what must stay together, as a patient; None: there are no groups. Never shown.
        row: of a manifest, as a spreadsheet counts (the heading is row 1).
    """

    path: Path
    name: str
    label: str
    split: Split | None = None
    group: str | None = field(default=None, repr=False)
    row: int | None = None


def leads_out(path: Path, root: Path) -> bool:
    """Whether links lead a path out of its root, which is a real path itself."""
    return not path.resolve().is_relative_to(root)
