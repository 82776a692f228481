"""Recipes and policies that come with protofed, in a checkout and in an installed package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from protofed.common.config.recipe import Recipe, read_recipe
from protofed.common.errors import unknown
from protofed.deploy.overrides import read_overrides, with_overrides

_HERE = Path(__file__).parent


def folder(name: str) -> Path:
    """`recipes`, `policies` or `sites`."""
    packaged = _HERE / name
    return packaged if packaged.is_dir() else _HERE.parents[1] / name


def recipe(name_or_path: str, assignments: Sequence[str] = ()) -> Recipe:
    """A recipe by its file, or by the name of one that comes with protofed.

    Args:
        assignments: as of `--set`, which go over what the recipe says.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    table = read_overrides(assignments)
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.exists():
        return with_overrides(read_recipe(path), table)
    known = {file.stem: file for file in folder("recipes").glob("*.toml")}
    if name_or_path not in known:
        raise unknown("recipe", name_or_path, known)
    return with_overrides(read_recipe(known[name_or_path]), table)
