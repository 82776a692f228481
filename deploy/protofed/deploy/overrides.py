"""Overrides of a recipe: `plan.lr=0.1` on the command line, `plan__lr=0.1` or a dict in Python."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from protofed.common.config.recipe import Recipe, parse
from protofed.common.config.toml_files import overlay
from protofed.common.errors import ConfigError


def read_overrides(assignments: Sequence[str]) -> dict[str, Any]:
    """Assignments in TOML (`plan.lr=0.1`, `name="mine"`) as one nested table; of two that set one key the last counts.

    Raises:
        ConfigError: an assignment is no TOML.
    """
    table: dict[str, Any] = {}
    for assignment in assignments:
        try:
            table = overlay(table, tomllib.loads(assignment))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"--set {assignment}: expected KEY=VALUE in TOML ({error}); text needs quotes") from error
    return table


def from_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords as one nested table: `plan__lr` and `plan.lr` are both the key `lr` of the table `plan`."""
    table: dict[str, Any] = {}
    for keyword, value in keywords.items():
        *tables, key = keyword.replace("__", ".").split(".")
        nested: dict[str, Any] = {key: value}
        for name in reversed(tables):
            nested = {name: nested}
        table = overlay(table, nested)
    return table


def with_overrides(recipe: Recipe, table: Mapping[str, Any]) -> Recipe:
    """The recipe with a table over it, merged as `extends` merges; the seed of the data is a key of its own.

    Raises:
        ConfigError: an unknown key, or a value that the recipe cannot have.
    """
    if not table:
        return recipe
    return parse(overlay(recipe.model_dump(mode="json"), dict(table)), Recipe, f"recipe '{recipe.name}'")


def leaves(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of nested tables with its path, as `plan.lr`, and what it is set to."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
