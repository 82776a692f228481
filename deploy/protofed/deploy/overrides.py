"""Overrides of a recipe: `plan.lr=0.1` on the command line, `plan__lr=0.1` or a dict in Python.

A key that is removed has the value None, which no TOML has: `plan.dp=` on the command line, `plan__dp=None` in Python.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from protofed.common.config.recipe import Recipe, parse
from protofed.common.config.toml_files import overlay, toml_problem, without
from protofed.common.errors import ConfigError

_REMOVED = re.compile(r"\s*([\w.-]+)\s*=\s*")


def read_overrides(assignments: Sequence[str]) -> dict[str, Any]:
    """Assignments in TOML (`plan.lr=0.1`, `name="mine"`) as one nested table; of two that set one key the last counts.

    An assignment of nothing (`plan.dp=`) removes a key.

    Raises:
        ConfigError: an assignment is no TOML.
    """
    table: dict[str, Any] = {}
    for assignment in assignments:
        if removed := _REMOVED.fullmatch(assignment):
            table = overlay(table, from_keywords({removed[1]: None}))
            continue
        try:
            table = overlay(table, tomllib.loads(assignment))
        except tomllib.TOMLDecodeError as error:
            problem = toml_problem(assignment, error)
            expected = f"expected KEY=VALUE in TOML ({problem}); text needs quotes, and KEY= removes the key"
            raise ConfigError(f"--set {assignment}: {expected}") from error
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
    where = f"recipe '{recipe.name}'"
    base, changes = recipe.model_dump(mode="json"), dict(table)
    for path in [path for path, value in leaves(table) if value is None]:
        base, changes = without(base, path, "removed key", where), without(changes, path, "removed key", where)
    return parse(overlay(base, changes), Recipe, where)


def leaves(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of nested tables with its path, as `plan.lr`, and what it is set to."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
