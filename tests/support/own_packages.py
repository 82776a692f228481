"""A package that `protofed new` wrote, as if pip had installed it."""

from __future__ import annotations

import tomllib
from pathlib import Path


def write_metadata(root: Path) -> None:
    """Write what pip would: the package's name, its version and its entry points. `root` must be on the path."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project["version"]
    info = root / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = [
        line
        for group, of_group in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{key} = {path}" for key, path in of_group.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(points))
