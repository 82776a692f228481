"""TOML files as plain tables: read, and laid over one another as `extends` does it."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from protofed.common.errors import ConfigError, nearest, short

MAX_EXTENDED = 8  # files of one chain of `extends`, which may be circular
_TYPOGRAPHIC = re.compile("[\u201c-\u201f\u2018-\u201b\u00ab\u00bb]")
_AT_LINE = re.compile(r"at line (\d+)")


def read_table(path: Path) -> dict[str, Any]:
    """A TOML file as plain tables and values.

    Raises:
        ConfigError: there is no such file, or it is no TOML.
    """
    try:
        # utf-8-sig: Windows' Notepad and PowerShell begin a UTF-8 file with a byte order mark.
        return parse_toml(path.read_text(encoding="utf-8-sig"), f"{path} is not TOML")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; expected a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: it is not UTF-8; save it again in that encoding") from error


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """TOML text as plain tables and values.

    Raises:
        ConfigError: it is no TOML; the text begins with `where`, and says what a person may have meant.
    """
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # beside TOMLDecodeError: an endless integer, tables 1000 deep
        raise ConfigError(f"{where}: {toml_problem(text, error)}") from error


def toml_problem(text: str, error: Exception) -> str:
    """What is wrong with a text that is no TOML, where a text processor or a path of Windows made it so."""
    number = _AT_LINE.search(str(error))
    lines = text.split("\n")
    at = int(number[1]) if number else len(lines)  # else the end of the text
    line = lines[at - 1] if at <= len(lines) else ""
    if quote := _TYPOGRAPHIC.search(line):
        return f'line {at} has a typographic quote ({quote[0]}); write " in its place'
    if "\\" in line:
        return f"line {at} has a \\ in double quotes; write a path as \"C:/images\", or as 'C:\\images' in single ones"
    return str(error)


def read_extended(path: Path) -> dict[str, Any]:
    """A recipe's table; with `extends = "other.toml"`, a path relative to it, over that file's keys.

    Tables are merged as by `overlay`, once the keys and tables that `unset` lists are taken out of the other file's.

    Raises:
        ConfigError: as of `read_table`; a chain of `extends` that is too long or circular; or an `unset` that takes
            nothing out.
    """
    return _read_chain(path, [])


def _read_chain(path: Path, extending: list[Path]) -> dict[str, Any]:
    """As `read_extended`, of a file that the last of `extending` extends."""
    if len(extending) == MAX_EXTENDED:
        raise ConfigError(f"{extending[0]} extends {MAX_EXTENDED} files; expected one that extends nothing at the end")
    table = read_table(path)
    base, unset = table.pop("extends", None), table.pop("unset", None)
    if base is None:
        if unset is not None:
            raise ConfigError(f"{path}: unset takes keys out of what a recipe extends; add extends, or remove it")
        return table
    if unset is not None and not (isinstance(unset, list) and all(isinstance(name, str) for name in unset)):
        raise ConfigError(f'{path}: unset: expected a list of keys and tables, as ["plan.max_grad_norm", "data"]')
    below = _read_chain(path.parent / str(base), [*extending, path])
    for name in unset or ():
        below = without(below, name, f"{path}: unset", str(base))
    return overlay(below, table)


def without(table: dict[str, Any], name: str, where: str, base: str) -> dict[str, Any]:
    """The table without a key or a table in it, by its path `plan.lr`.

    Raises:
        ConfigError: it has none of that path.
    """
    *tables, key = name.split(".")
    found = copy.deepcopy(table)
    inner: Any = found
    for step in tables:
        inner = inner.get(step) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or key not in inner:
        similar = nearest(name, _paths(table))
        hint = f"did you mean '{similar}'?" if similar else "remove it"
        raise ConfigError(f"{where} = '{short(name)}': {short(base)} sets no such key; {hint}")
    del inner[key]
    return found


def _paths(table: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Every key and table in it, by its path."""
    for key, value in table.items():
        yield f"{path}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{path}{key}.")


def overlay(base: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """`base` updated by `table`, key by key.

    A table that changes its `name` or `kind` replaces the other's as a whole, whose options are of another class.
    """
    merged = {**base, **table}
    for key, value in table.items():
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not _replaces_base(value, old):
            merged[key] = overlay(old, value)
    return merged


def _replaces_base(table: dict[str, Any], base: dict[str, Any]) -> bool:
    return any(key in table and table[key] != base.get(key) for key in ("name", "kind"))
