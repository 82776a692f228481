"""Finds the recipes, policies and site settings that come with protofed, in a checkout and in an installed package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from protofed.common.config.recipe import Recipe, read_recipe
from protofed.common.errors import unknown
from protofed.deploy.overrides import read_overrides, with_overrides

_HERE = Path(__file__).parent


def folder(name: str) -> Path:
    """The folder `recipes`, `policies` or `sites`."""
    packaged = _HERE / name  # there in a wheel only; a checkout has them in deploy/
    return packaged if packaged.is_dir() else _HERE.parents[1] / name


def recipe(name_or_path: str, assignments: Sequence[str] = ()) -> Recipe:
    """Read a recipe by its path, or by the name of one that comes with protofed.

    Args:
        assignments: of `--set`, such as `plan.lr=0.1`; they replace what the recipe says.

    Raises:
        ConfigError: there is no such recipe, or it cannot be used.
    """
    table = read_overrides(assignments)
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.exists():
        return with_overrides(read_recipe(path), table)
    files = {file.stem: file for file in folder("recipes").glob("*.toml")}
    if name_or_path not in files:
        raise unknown("recipe", name_or_path, files)
    return with_overrides(read_recipe(files[name_or_path]), table)
