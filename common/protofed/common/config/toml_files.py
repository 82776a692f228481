"""TOML files as plain tables: read, laid over one another as `extends` does it, and explained.

What is wrong with a file that a person wrote is said in one line: the first problem, and what is right at its place.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, SecretStr, ValidationError

from protofed.common.deprecated import rename_keys
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
    table = rename_keys(read_table(path), "Recipe", str(path))  # each by itself: one may have the old key, one the new
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
    result = copy.deepcopy(table)
    inner: Any = result
    for step in tables:
        inner = inner.get(step) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or key not in inner:
        similar = nearest(name, _paths(table))
        hint = f"did you mean '{similar}'?" if similar else "remove it"
        raise ConfigError(f"{where} = '{short(name)}': {short(base)} sets no such key; {hint}")
    del inner[key]
    return result


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


# Keys that only one kind of file has, at its top level: by two of them it is recognised where another was expected.
HALLMARKS: Mapping[str, frozenset[str]] = {
    "a recipe": frozenset({"rounds", "classes", "class_names", "input", "method", "model", "plan", "federation"}),
    "a site's settings": frozenset({"site", "server", "roles", "policy", "partition_index", "device", "proxy"}),
    "a server's settings": frozenset({"recipes", "listen", "max_connections", "ledger", "blobs", "memory_limit_mb"}),
    "a policy": frozenset({"methods", "parts", "telemetry", "dtypes", "example_count", "approval", "limits"}),
}
# Other software's word -> ours; too far from it for `nearest`.
_OTHERS: Mapping[str, str] = {
    "alpha": "beta",  # of a Dirichlet draw
    "learning_rate": "lr",
    "local_epochs": "epochs",
    "num_epochs": "epochs",
    "num_rounds": "rounds",
    "num_classes": "classes",
    "num_clients": "sites",
    "clients": "sites",
    "algorithm": "method",
    "strategy": "method",
    "dataset": "source",
    "path": "root",
}
_NO_TABLE = ("model_type", "model_attributes_type", "dict_type", "mapping_type")


def explain(error: ValidationError, model: type[BaseModel], table: Mapping[str, Any] | None = None) -> str:
    """The first problem, with what was expected.

    Args:
        table: the file's content; None: it is not a file of a person's.
    """
    if table is not None and (other := _mistaken(table, model)):
        return other
    # Unknown keys first: a typo explains a missing key.
    problem = min(error.errors(), key=lambda details: details["type"] != "extra_forbidden")
    path = ".".join(map(str, _written(model, problem["loc"])))
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{short(path)}'{_hint(model, problem['loc'])}"
    if problem["type"] == "missing":
        return f"'{path}' is missing; add it"
    text = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in _NO_TABLE:
        text = _table_expected(model, problem["loc"], problem["input"])
    if path and _holds_secret(model, problem["loc"]):  # of which perhaps nothing is wrong
        return f"{path}: {text}"
    return f"{path} = {short(repr(problem['input']))}: {text}" if path else text


def _table_expected(model: type[BaseModel], loc: tuple[int | str, ...], value: object) -> str:
    """What to write in place of a value where a table is expected: `method = "fedavg"`."""
    path = ".".join(map(str, _written(model, loc)))
    fields = {name: field for part in _models_at(model, loc) for name, field in part.model_fields.items()}
    key = next((name for name in ("name", "kind", "source", "listen") if name in fields), None)
    if key is not None and isinstance(value, str):
        return f'expected a table; write {path} = {{ {key} = "{short(value)}" }}'
    return f"expected a table; write [{path}]" + (f" with its keys: {', '.join(sorted(fields))}" if fields else "")


def _mistaken(table: Mapping[str, Any], model: type[BaseModel]) -> str:
    """That the file is one of another kind than `model`; empty: it is not."""
    fields = set(model.model_fields)
    own = next((kind for kind, keys in HALLMARKS.items() if keys <= fields), None)
    if own is None or HALLMARKS[own] & set(table):
        return ""
    other = max(HALLMARKS, key=lambda kind: len(HALLMARKS[kind] & set(table)))
    if len(HALLMARKS[other] & set(table)) < 2:
        return ""
    return f"this is {other}; expected {own}: name the right file"


def _hint(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """What the unknown key at `loc` should be: a key of the same table, or the table that it belongs into."""
    key = str(loc[-1])
    here = {name for part in _models_at(model, loc[:-1]) for name in part.model_fields}
    tables = dict(_tables(model))
    table, _, inner = key.replace("__", ".").rpartition(".")
    if table in tables and inner and "__" in key:  # `plan__lr`, as in Python's keywords
        return f": write '{table}.{_ours(inner, tables[table])}'"
    if similar := nearest(key, here):
        return f": did you mean '{similar}'?"
    if (ours := _OTHERS.get(key)) in here:
        return f": it is called '{ours}'"
    for candidate in (key, ours):
        if places := [f"[{place}]" for place, fields in tables.items() if place and candidate in fields]:
            called = "it belongs into" if candidate == key else f"it is called '{candidate}', of"
            return f": {called} {' or '.join(places)}"
    return f"; expected one of: {', '.join(sorted(here))}; or remove it" if here else "; remove it"


def _ours(key: str, here: Collection[str]) -> str:
    """The key of a table that a word stands for; the word itself, if there is none."""
    ours = _OTHERS.get(key, "")
    return key if key in here else ours if ours in here else nearest(key, here) or key


def _written(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The keys of a path: pydantic puts the kind of a table that may be of several kinds between them."""
    return tuple(step for end, step in enumerate(loc) if not _is_tag(model, loc[:end], step))


def _is_tag(model: type[BaseModel], table: tuple[int | str, ...], step: int | str) -> bool:
    """Whether a step from a table is the table's kind, or that of a plug-in's, and no key."""
    kinds = _models_at(model, table)
    if len(kinds) < 2 or isinstance(step, int):
        return False
    return any(_is_kind(kind, step) for kind in kinds) or not any(step in kind.model_fields for kind in kinds)


def _models_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> Collection[type[BaseModel]]:
    """The models of the table at `loc`; several where it may be of several kinds."""
    models: list[type[BaseModel]] = [model]
    for step in map(str, loc):
        # A table that may be of several kinds has its kind in the path, which is no key.
        if len(models) > 1 and (of_kind := [part for part in models if _is_kind(part, step)]):
            models = of_kind
        elif fields := [part.model_fields[step] for part in models if step in part.model_fields]:
            models = [inner for field in fields for inner in _models_in(field.annotation)]
    return models


def _holds_secret(model: type[BaseModel], loc: tuple[int | str, ...]) -> bool:
    """Whether the table at `loc` has a key whose values are never shown."""
    fields = (field for table in _models_at(model, loc) for field in table.model_fields.values())
    return any(_is_secret(field.annotation) for field in fields)


def _is_secret(annotation: Any) -> bool:
    return annotation is SecretStr or any(map(_is_secret, get_args(annotation)))


def _is_kind(model: type[BaseModel], kind: str) -> bool:
    return "kind" in model.model_fields and kind in get_args(model.model_fields["kind"].annotation)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _tables(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, set[str]]]:
    """Every table within a model, by its path, with its keys; of a table of several kinds, all of theirs."""
    yield path, set(model.model_fields)
    for name, field in model.model_fields.items():
        inner = list(_models_in(field.annotation))
        if inner:
            place = f"{path}.{name}" if path else name
            yield place, {key for part in inner for key in part.model_fields}
            for part in inner:
                yield from ((deeper, keys) for deeper, keys in _tables(part, place) if deeper != place)
