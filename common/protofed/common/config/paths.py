"""Paths in settings: those of a file are taken from the file's own folder, and `~` is a home folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, Field

from protofed.common.config.data import Data, data_folder
from protofed.common.errors import ConfigError, short

SQLITE = "sqlite:///"


class PathIn(Enum):
    """Marks a text that is, or holds, a path."""

    NAME_OR_FILE = "a name, or a file"
    URL = "a URL: SQLite's has the path of a file"


def _as_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, Path) else value


# A word is the name of a file that comes with protofed. A text with a "/", or that ends in .toml, is a path.
NameOrFile = Annotated[str, BeforeValidator(_as_text), Field(min_length=1), PathIn.NAME_OR_FILE]
DatabaseUrl = Annotated[str, PathIn.URL]


def anchored(table: Mapping[str, Any], model: type[BaseModel], folder: Path) -> dict[str, Any]:
    """The table of a model with every path in it below `folder`; absolute paths stay. `~` becomes a home folder.

    Raises:
        ConfigError: `~` is nobody's home folder; or a name is that of a file in `folder`, too.
    """
    found = dict(table)
    for key, value in table.items():
        if (field := model.model_fields.get(key)) is not None:
            # A relative root is below the folder that PROTOFED_DATA names, if it is set: `Data.place` sees to it.
            elsewhere = issubclass(model, Data) and key == "root" and data_folder() is not None
            kinds = [*_walk(field.annotation), *field.metadata]
            found[key] = _anchored_value(value, kinds, Path() if elsewhere else folder, key)
    return found


def _anchored_value(value: Any, kinds: Sequence[Any], folder: Path, key: str) -> Any:
    """As `anchored`, of one value; `kinds` has the types and marks of its annotation."""
    if isinstance(value, list | tuple):
        return [_anchored_value(item, kinds, folder, key) for item in value]
    if isinstance(value, Mapping):
        for model in (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)):
            value = anchored(value, model, folder)
        return value
    if not isinstance(value, str | Path):
        return value
    if Path in kinds:
        return _below(folder, value, key)
    if PathIn.NAME_OR_FILE in kinds:
        return _name_or_file(os.fspath(value), folder, key)
    if PathIn.URL in kinds:
        return _url(str(value), folder, key)
    return value


def _walk(annotation: Any) -> Iterator[Any]:
    """All types and marks within an annotation."""
    yield annotation
    for argument in get_args(annotation):
        yield from _walk(argument)


def _below(folder: Path, path: str | Path, key: str) -> Path:
    if any(sign in str(path) for sign in "\t\n\r\f\b"):  # what TOML reads in "C:\temp": a tab
        raise ConfigError(
            f"{key} = {short(repr(str(path)))}: in double quotes a \\ begins a control character; write a path as "
            "\"C:/temp\", or as 'C:\\temp' in single ones"
        )
    try:
        return folder / Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{key} = '{short(str(path))}': no user has this home folder; write the whole path"
        ) from error


def _name_or_file(text: str, folder: Path, key: str) -> str:
    if is_path(text):
        path = os.fspath(_below(folder, text, key))
        return path if is_path(path) else f"./{path}"  # pathlib drops "./", and the rest would be a name
    if folder != Path() and (folder / text).is_file():
        raise ConfigError(
            f"{key} = '{short(text)}': a word is the name of what comes with protofed, and {folder} has a file of "
            f"that name, too; for the file write './{short(text)}'; for the other one rename the file"
        )
    return text


def is_path(text: str) -> bool:
    """Whether a text is the path of a file; else it is the name of one that comes with protofed."""
    return "/" in text or text.endswith(".toml")


def _url(url: str, folder: Path, key: str) -> str:
    file = url.removeprefix(SQLITE)
    return url if file == url or file.startswith(("/", ":")) or not file else f"{SQLITE}{_below(folder, file, key)}"
