"""Plug-ins: methods, models, datasets and partitions of packages outside protofed, named in a recipe.

A recipe names a plug-in as it names what comes with protofed, by an entry point of an installed package:

    [project.entry-points."protofed.methods"]      # or protofed.models, protofed.datasets, protofed.partitions
    fedprox = "fedprox:METHOD"

or without one by its path, `package.module:attribute`. What the path must hold:

- method: a `MethodPlugin`. Its two halves are imported separately, because the server has no torch and a site does not
  import the server;
- model: a factory(input, classes, **options) that returns a `protofed.client.models.split.SplitModel`;
- dataset: a function(data) of a `protofed.common.config.data.Data` (with `data.options`) that returns two
  `protofed.client.data.split.DataSplit`, training and test; either may be None;
- partition: a function(labels, rng, **options) of labels [N], int64, and a `numpy.random.RandomState` that returns for
  each site the indices of its examples, int64.

A process imports only plug-ins that it is configured to allow by name: a daemon by `plugins` in the site's policy or
the server's settings, `simulate` by the recipe that its user gives. A recipe that comes from elsewhere selects among
these names and adds none. A name that comes with protofed is never looked up among plug-ins.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar

from protofed.common.errors import ConfigError, nearest, short, unknown

P = TypeVar("P")


class PluginKind(StrEnum):
    """What a plug-in can be; its entry points are in the group `protofed.{kind}s`."""

    METHOD = "method"
    MODEL = "model"
    DATASET = "dataset"
    PARTITION = "partition"


@dataclass(frozen=True)
class MethodPlugin:
    """A method of another package; the module with this object must import neither half.

    Attributes:
        client: `package.module:Class` of a `protofed.client.method.ClientMethod`, a frozen dataclass; or the name of a
            method of protofed whose client half serves.
        server: likewise of a `protofed.server.method.ServerMethod`.
        client_options: the fields of the client half, so that the server half can tell its options from typos.
        server_options: likewise of the server half.
        title: the method's name in reports and model cards; empty: its name in recipes.
        source: authors, venue and year of its paper, as `Dai et al., AAAI 2023`; empty: there is none.
    """

    client: str
    server: str
    client_options: tuple[str, ...] = ()
    server_options: tuple[str, ...] = ()
    title: str = ""
    source: str = ""


_allowed: set[str] = set()


def allow(names: Iterable[str]) -> None:
    """Allow this process to load these plug-ins, too; commands and daemons call it first.

    Args:
        names: as in recipes; names that come with protofed have no effect.
    """
    _allowed.update(names)


def is_allowed(name: str) -> bool:
    """Whether this process may load a plug-in of this name; it need not be installed."""
    return name in _allowed


def is_plugin(kind: PluginKind, name: str) -> bool:
    """Whether a name that does not come with protofed is a path, or an entry point of an installed package.

    Reads only the metadata of installed packages; imports nothing.
    """
    return ":" in name or name in _entry_points(kind)


def path_of(kind: PluginKind, name: str) -> str | None:
    """The `package.module:attribute` of a plug-in; None: the name is none of a plug-in. Imports nothing."""
    return name if ":" in name else _entry_points(kind).get(name)


def load(kind: PluginKind, name: str, known: Iterable[str], allowed: Container[str] | None = None) -> Any:
    """Import the object of a plug-in.

    Args:
        name: of an entry point, or a path.
        known: the names of this kind that come with protofed, for the error's suggestion.
        allowed: names that may be imported; None: those passed to `allow`.

    Raises:
        ConfigError: there is no such plug-in, it is not allowed (then nothing of it is imported), or it cannot be
            imported.
    """
    path = path_of(kind, name)
    if path is None:
        raise _unknown(kind, name, {*known, *_entry_points(kind)})
    if name not in (_allowed if allowed is None else allowed):
        raise ConfigError(
            f"{kind} '{short(name)}' is a plug-in that is not allowed here: add it to `plugins` in the site's policy, "
            "or in the server's settings"
        )
    return import_object(path, f"{kind} '{name}'")


def _unknown(kind: PluginKind, name: str, known: set[str]) -> ConfigError:
    error = unknown(kind, name, known)
    if nearest(name, known):  # a typo
        return error
    return ConfigError(
        f"{error}; for a {kind} of your own run `pip install -e .` in the folder of its package, or name it "
        "package.module:ATTRIBUTE"
    )


def import_object(path: str, label: str) -> Any:
    """Import the object at `package.module:attribute`; the caller has checked that it is allowed.

    Args:
        label: the beginning of an error's text.

    Raises:
        ConfigError: there is no such module or attribute.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # a module's top level is foreign code: it may raise anything
        raise ConfigError(
            f"{label}: module '{module_name}' cannot be imported: {error_line(error)}; "
            "expected package.module:attribute, installed in this process's environment"
        ) from error
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise ConfigError(f"{label}: module '{module_name}' has no '{attribute}'") from error


def check_type(value: object, expected: type[P], label: str) -> P:
    """`value`, checked to be an `expected`.

    Args:
        label: the beginning of an error's text.

    Raises:
        ConfigError: it is of another type.
    """
    if not isinstance(value, expected):
        raise ConfigError(f"{label} is a {type(value).__name__}: expected a {expected.__name__}")
    return value


def error_line(error: Exception) -> str:
    """The error of a plug-in's code in one line: its class and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _entry_points(kind: PluginKind) -> dict[str, str]:
    """The paths of entry points of a kind, by name.

    Raises:
        ConfigError: two packages register one name, so it is unclear which of them was allowed.
    """
    paths: dict[str, str] = {}
    for point in entry_points(group=f"protofed.{kind}s"):
        if paths.setdefault(point.name, point.value) != point.value:
            raise ConfigError(
                f"{kind} '{point.name}' is registered by two packages, as {paths[point.name]} and as {point.value}; "
                "uninstall one of them"
            )
    return paths
