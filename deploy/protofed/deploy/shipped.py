"""Finds the recipes, policies and site settings that come with protofed, in a checkout and in an installed package."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

from protofed.common.config.recipe import Recipe, parse, read_recipe
from protofed.common.config.settings import is_path
from protofed.common.config.toml_files import read_extended, read_table
from protofed.common.errors import ConfigError, unknown
from protofed.deploy.overrides import leaves, read_overrides, with_overrides

_HERE = Path(__file__).parent
# Beside this file in a wheel; a checkout has them in deploy/.
ROOT: Final = _HERE if (_HERE / "recipes").is_dir() else _HERE.parents[1]
Kind: TypeAlias = Literal["recipe", "policy"]
FOLDERS: Final = {"recipe": "recipes", "policy": "policies"}
_SENTENCE = re.compile(r"(.+?[.!?])(?:\s|$)")


def folder(name: str) -> Path:
    """The folder `recipes`, `policies` or `sites`."""
    return ROOT / name


def files(kind: str) -> dict[str, Path]:
    """The shipped files of a kind, `recipes` or `policies`, by name."""
    return {file.stem: file for file in sorted(folder(kind).glob("*.toml"))}


def recipe(name_or_path: str, assignments: Sequence[str] = ()) -> Recipe:
    """Read a recipe by its path, or by the name of one that comes with protofed.

    Args:
        assignments: of `--set`, such as `plan.lr=0.1`; they replace what the recipe says.

    Raises:
        ConfigError: there is no such recipe, or it cannot be used.
    """
    return with_overrides(read_recipe(recipe_file(name_or_path)), read_overrides(assignments))


def recipe_file(name_or_path: str) -> Path:
    """The file of a recipe, as `recipe` reads it.

    Raises:
        ConfigError: there is no recipe of that name.
    """
    path = Path(name_or_path)
    return path if path.suffix == ".toml" or path.exists() else named("recipe", name_or_path)


def policy(name_or_path: str) -> Path:
    """The file of a policy: a word is the name of one that comes with protofed, all else is a path.

    A site must not get a policy other than the one that it meant: a word that is also a file's name is refused.

    Raises:
        ConfigError: there is no policy of that name; or a file here has the name.
    """
    path = Path(name_or_path)
    if is_path(name_or_path):
        return path
    if path.is_file():
        raise ConfigError(
            f"policy '{name_or_path}': a word is the name of a policy that comes with protofed, and there is a file of "
            f"that name here; for the file write './{name_or_path}'; for the other one rename the file"
        )
    return named("policy", name_or_path)


def what(file: Path) -> str:
    """What a shipped file is: the first sentence of its first comment."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("#").strip() for line in lines[: _first_key(lines)]]
    sentence = _SENTENCE.match(text := " ".join(comment))
    return sentence[1] if sentence else text


def named(kind: Kind, name: str) -> Path:
    """The shipped file of a name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in (shipped := files(FOLDERS[kind])):
        raise unknown(kind, name, shipped)
    return shipped[name]


def extends(file: Path) -> str:
    """The file that a recipe extends, as it names it; empty: none."""
    return str(read_table(file).get("extends", ""))


def resolved(name_or_path: str) -> str:
    """A recipe as TOML with what it extends merged in, so that it needs no other file. Comments are gone.

    Raises:
        ConfigError: as `recipe`.
    """
    table = read_extended(file := recipe_file(name_or_path))
    parse(table, Recipe, str(file))
    base = extends(file)
    lines = [f"# {what(file)}", f"# {file.name}" + (f" with {base}, which it extends, merged in." if base else ".")]
    lines += [_assignment(key, value) for key, value in table.items() if not isinstance(value, dict)]
    for name, inner in table.items():
        if isinstance(inner, dict):
            lines += ["", f"[{name}]", *(_assignment(key, value) for key, value in leaves(inner))]
    return "\n".join(lines) + "\n"


def _assignment(key: str, value: object) -> str:
    return f"{key} = {json.dumps(value, ensure_ascii=False)}"  # of strings, numbers, booleans and lists TOML is JSON


def _first_key(lines: Sequence[str]) -> int:
    return next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))
