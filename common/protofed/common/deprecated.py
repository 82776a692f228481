"""Keys and commands under their old names: they work, with a warning, until the version in which the old name ends.

From 0.3.0 on a renamed key or command is listed here for at least one minor version. `tests/test_release.py` fails when
an entry has reached its end. Environment variables are not among them: an unknown one is an error.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from protofed.common.errors import ConfigError


@dataclass(frozen=True)
class Renamed:
    """What an old name is called now.

    Attributes:
        new: the new key, in the same table, or the words of the new command.
        ends: the version that takes the old name no more, as "0.5.0".
    """

    new: str
    ends: str


KEYS: Final[Mapping[tuple[str, str], Renamed]] = {}  # (class of the file's settings, old path as "plan.lr") -> new key
COMMANDS: Final[Mapping[str, Renamed]] = {}  # first words of an old command line, as "client plan" -> new words


def rename_keys(
    table: Mapping[str, Any], kind: str, where: str, keys: Mapping[tuple[str, str], Renamed] = KEYS
) -> dict[str, Any]:
    """A file's table with its old keys under their new names; each is warned of.

    Args:
        kind: the class of the file's settings: `Recipe`, `PolicyRules`, …
        where: the file's name, for messages.

    Raises:
        ConfigError: the table has a key under both names.
    """
    result = copy.deepcopy(dict(table))
    for path, renamed in _rename(result, kind, where, keys):
        _warn(f"{where}: '{path}'", f"'{renamed.new}'", renamed.ends)
    return result


def rename_json(text: str, kind: str, where: str, keys: Mapping[tuple[str, str], Renamed] = KEYS) -> str:
    """As `rename_keys`, of JSON that software wrote: a recorded recipe, or one that is sent. Nobody is warned."""
    if all(of != kind for of, _ in keys):
        return text
    try:
        table = json.loads(text)
    except ValueError:
        return text  # whoever reads it says so
    return json.dumps(table) if isinstance(table, dict) and list(_rename(table, kind, where, keys)) else text


def rename_command(words: Sequence[str], commands: Mapping[str, Renamed] = COMMANDS) -> list[str]:
    """A command line with an old command under its new name, which is warned of."""
    for old, renamed in commands.items():
        first = old.split()
        if list(words[: len(first)]) == first:
            _warn(f"`protofed {old}`", f"`protofed {renamed.new}`", renamed.ends)
            return [*renamed.new.split(), *words[len(first) :]]
    return list(words)


def _rename(
    table: dict[str, Any], kind: str, where: str, keys: Mapping[tuple[str, str], Renamed]
) -> Iterator[tuple[str, Renamed]]:
    """Rename the old keys in the table itself; yields each that it has."""
    for (of, path), renamed in keys.items():
        *tables, old = path.split(".")
        if of != kind or old not in (inner := _inner(table, tables)):
            continue
        if renamed.new in inner:
            raise ConfigError(f"{where}: '{path}' is called '{renamed.new}', which is there too; remove '{path}'")
        inner[renamed.new] = inner.pop(old)
        yield path, renamed


def _inner(table: Any, path: Sequence[str]) -> dict[str, Any]:
    for step in path:
        table = table.get(step) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}


def _warn(old: str, new: str, ends: str) -> None:
    import structlog  # a third of the time in which the command line starts

    structlog.get_logger().warning(f"{old} is now called {new}. Version {ends} does not accept the old name any more")
