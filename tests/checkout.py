"""Makes `protofed` importable from a checkout that nobody has installed; imported before all else of `tests`.

A machine that is lent for an hour, with a GPU and a bare PyTorch, has the working tree and a folder of libraries on
PYTHONPATH, but no `pip install`. Where protofed is installed, nothing happens. Nothing here needs a library.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
NAME = "protofed"
ANY = metadata.DistributionFinder.Context()
_WINGS = ("server", "client", "common", "deploy", "protos")


class _Uninstalled(metadata.Distribution):
    """What an installation would say of itself; protofed reads its version from it."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {project['version']}\n"

    def locate_file(self, path: object) -> Path:
        return ROOT / str(path)


class _Finder(metadata.DistributionFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None  # modules are found on the path

    def find_distributions(self, context: metadata.DistributionFinder.Context = ANY) -> Iterator[metadata.Distribution]:
        if context.name in (None, NAME):
            yield _Uninstalled()


def make_importable() -> None:
    """Put the checkout on this process's path, unless protofed is installed."""
    try:
        metadata.version(NAME)
    except metadata.PackageNotFoundError:
        sys.path[:0] = [str(ROOT / wing) for wing in _WINGS]
        sys.meta_path.append(_Finder())


make_importable()
