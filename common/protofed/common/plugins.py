"""Plug-ins: methods, models, datasets, partitions and transforms of packages outside protofed, named in a recipe.

A recipe names a plug-in as it names what comes with protofed, by an entry point of an installed package:

    [project.entry-points."protofed.methods"]      # or .models, .datasets, .partitions, .transforms, .tasks
    fedprox = "fedprox:METHOD"

or without one by its path, `package.module:attribute`. What the path must hold:

- method: a `MethodPlugin`. Its client and server algorithms are imported separately, because the server has no torch
  and a site does not import the server;
- model: a factory(input, classes, **options) that returns a `protofed.client.models.split.SplitModel`;
- dataset: a function(data) of a `protofed.common.config.data.Data` (with `data.options`) that returns a
  `torch.utils.data.Dataset` of images, labels and, if it knows them, patients; or two of them, training and test, of
  which either may be None; or two `protofed.client.data.split.DataSplit`;
- partition: a function(labels, rng, **options) of labels [N], int64, and a `numpy.random.RandomState` that returns for
  each site the indices of its examples, int64;
- transform: a factory(**options) that returns a function of an image [channels, H, W], a tensor of uint8 or of float32
  in 0..1, that returns such an image;
- task: a frozen dataclass, a `protofed.common.config.tasks.LearningTask`, which names its half in PyTorch.

A process imports only plug-ins that it allows by name. A daemon has their names in `plugins`, in the site's policy or
the server's settings. `simulate` allows the names in its user's recipe. A recipe that comes from elsewhere selects
among these names and adds none. A name that comes with protofed is never looked up among plug-ins.

A `Registry` has classes by name, registered or of plug-ins; an unknown name is an error, never a default.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

from protofed.common.errors import ConfigError, nearest, short, unknown

P = TypeVar("P")
TaskNames: TypeAlias = frozenset[str] | Literal["any"]  # by name; "any": those of plug-ins, too


class PluginKind(StrEnum):
    """What a plug-in can be; its entry points are in the group `protofed.{kind}s`."""

    METHOD = "method"
    MODEL = "model"
    DATASET = "dataset"
    PARTITION = "partition"
    TRANSFORM = "transform"
    TASK = "task"


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
        tasks: as its client half declares: the tasks that it is defined for.
    """

    client: str
    server: str
    client_options: tuple[str, ...] = ()
    server_options: tuple[str, ...] = ()
    title: str = ""
    source: str = ""
    tasks: TaskNames = "any"


_allowed: set[str] = set()


def allow(names: Iterable[str]) -> None:
    """Allow this process to load these plug-ins, too; commands and daemons call it first.

    Args:
        names: as in recipes; names that come with protofed have no effect.
    """
    _allowed.update(names)


def allowed() -> frozenset[str]:
    """The names that this process may load, for another process of the same owner."""
    return frozenset(_allowed)


def is_allowed(name: str) -> bool:
    """Whether this process may load a plug-in of this name; it need not be installed."""
    return name in _allowed


def is_plugin(kind: PluginKind, name: str) -> bool:
    """Whether a name that does not come with protofed is a path, or an entry point of an installed package.

    Reads only the metadata of installed packages; imports nothing.
    """
    return ":" in name or name in _entry_points(kind)


def find_path(kind: PluginKind, name: str) -> str | None:
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
    path = find_path(kind, name)
    if path is None:
        raise _unknown(kind, name, {*known, *_entry_points(kind)})
    if name not in (_allowed if allowed is None else allowed):
        raise ConfigError(
            f"{kind} '{short(name)}' is a plug-in that is not allowed here. Add it to `plugins` in the site's "
            "policy or the server's settings; `protofed export` and `predict` take --allow-plugin"
        )
    return import_object(path, f"{kind} '{name}'")


def _unknown(kind: PluginKind, name: str, known: set[str]) -> ConfigError:
    error = unknown(kind, name, known)
    if nearest(name, known):  # a typo
        return error
    return ConfigError(
        f"{error}. For a {kind} of your own run `pip install -e .` in the folder of its package, or name it "
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


ONE_CLASS: Final = frozenset({"classification"})  # the task of a method that knows classes: of one an image
T = TypeVar("T")
C = TypeVar("C", bound=type[Any])


@dataclass(frozen=True)
class Method:
    """A method as its server half registers it: all that is known of it without PyTorch.

    Attributes:
        name: in recipes and policies.
        title: in prose.
        source: authors, venue and year of its paper; empty: there is none.
        client_options: the fields of its client half, so that the server half can tell its options from typos.
        sends_nothing: its sites keep all that they train.
        tasks: as its client half declares: the tasks that it is defined for.
    """

    name: str
    title: str
    source: str = ""
    client_options: tuple[str, ...] = ()
    sends_nothing: bool = False
    tasks: TaskNames = "any"

    @property
    def cited(self) -> str:
        """The title with its paper, as `FedNH (Dai et al., AAAI 2023)`."""
        return f"{self.title} ({self.source})" if self.source else self.title


class Registry(Generic[T]):
    """Frozen dataclasses by name; their fields are the options that a recipe may set.

    Args:
        kind: of what, for errors: "method", "model".
        half: of methods, which half these classes are; a name that is not registered may then be a plug-in's.
        home: the package whose import registers the classes of protofed; it is imported when one is first asked for,
            so that nobody who asks can have forgotten to.
        protocols: the first has what a class must have; all together, what it may have beside its fields and what
            begins with `_`: a misspelt member would be one that is not there. None: a class may have any members.
        plugin: a name that is not registered may be a plug-in of this kind, which is such a class.
    """

    def __init__(
        self,
        kind: str,
        half: Literal["client", "server"] | None = None,
        home: str = "",
        protocols: Sequence[type] | None = None,
        plugin: PluginKind | None = None,
    ) -> None:
        self._kind, self._half, self._home = kind, half, home
        self._protocols, self._plugin_kind = protocols, plugin
        self._classes: dict[str, type[Any]] = {}
        self._foreign: dict[str, tuple[str, ...]] = {}
        self._methods: dict[str, Method] = {}

    def register(self, *entries: str | Method, **names_with_options: tuple[str, ...]) -> Callable[[C], C]:
        """Register a class under one or more names.

        Args:
            entries: names whose options are all fields of this class; a server half registers its methods.
            names_with_options: names with the options of the *other* half of the method, so that each half can tell
                an option of the other from a typo.
        """
        methods = {entry.name: entry for entry in entries if isinstance(entry, Method)}
        foreign: dict[str, tuple[str, ...]] = {entry: () for entry in entries if isinstance(entry, str)}
        foreign |= {name: method.client_options for name, method in methods.items()} | names_with_options

        def enter(cls: C) -> C:
            self._check_members(cls)
            for name, options in foreign.items():
                if name in self._classes:
                    raise ConfigError(f"{self._kind} '{name}' is registered twice")
                self._classes[name], self._foreign[name] = cls, options
            self._methods.update(methods)
            return cls

        return enter

    def __iter__(self) -> Iterator[str]:
        self._go_home()
        return iter(sorted(self._classes))

    def get(self, name: str) -> type[T]:
        """The class of a name; errors as of `build`."""
        return self._resolve(name)[0]

    def about(self, name: str) -> Method:
        """Title and source of a method; of one that is not known here, or not allowed, its name stands for both."""
        self._go_home()
        if name not in self._methods and name not in self._classes and is_allowed(name):
            with suppress(ConfigError):  # a report of its run is written without it
                plugin = self._plugin(name)
                about = plugin.title or name, plugin.source, plugin.client_options
                return Method(name, *about, tasks=plugin.tasks)
        return self._methods.get(name, Method(name, name))

    def options(self, name: str) -> set[str]:
        """The options of this half or model."""
        return _fields(self.get(name))

    def foreign(self, name: str) -> set[str]:
        """The options of the other half."""
        return self._resolve(name)[1]

    def build(self, name: str, options: Mapping[str, Any], allowed: Container[str] | None = None) -> T:
        """An instance with these options; those of the other half are ignored.

        Args:
            allowed: plug-ins that may be imported; None: those that `plugins.allow` has allowed in this process.

        Raises:
            ConfigError: an unknown name or option (with the nearest known one), a value out of range, or a plug-in
                that is not allowed or cannot be used.
        """
        from pydantic import TypeAdapter, ValidationError  # not for a command's help

        cls, foreign = self._resolve(name, allowed)
        options_of_half = _fields(cls)
        known = options_of_half | foreign
        for option in options:
            if option not in known:
                raise unknown(f"option of {self._kind} {name}", option, known or {"(none)"})
        try:
            return TypeAdapter(cls).validate_python({k: v for k, v in options.items() if k in options_of_half})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(step) for step in first["loc"])
            raise ConfigError(
                f"{self._kind} {name}: {where} = {short(repr(first['input']))}: {first['msg']}"
            ) from error

    def _resolve(self, name: str, allowed: Container[str] | None = None) -> tuple[type[T], set[str]]:
        """The class of that name, and the options of the other half."""
        self._go_home()
        if name in self._classes:
            return self._classes[name], set(self._foreign[name])
        label, cls = f"{self._kind} '{name}'", None
        if self._plugin_kind is not None:
            cls = load(self._plugin_kind, name, self._classes, allowed)
            return self._checked(cls, label, f"a {self._kind}"), set()
        if self._half is None:
            raise unknown(self._kind, name, self._classes)
        plugin = self._plugin(name, allowed)
        path = plugin.client if self._half == "client" else plugin.server
        cls = import_object(path, label) if ":" in path else self.get(path)
        checked = self._checked(cls, f"{label}: {path}", f"the {self._half} algorithm of a method")
        return checked, {*plugin.client_options, *plugin.server_options} - _fields(checked)

    def _checked(self, cls: Any, label: str, expected: str) -> type[T]:
        if not isinstance(cls, type) or not hasattr(cls, "__dataclass_fields__"):
            raise ConfigError(f"{label} is no dataclass; expected {expected}")
        self._check_members(cls)
        return cls

    def _check_members(self, cls: type[Any]) -> None:
        """Raises ConfigError: it has a member that no protocol knows, or lacks one that each half must have."""
        if self._protocols is None:
            return
        known = _fields(cls).union(*map(_public, self._protocols))
        members = _fields(cls).union(*map(_public, cls.__mro__[:-1]))
        label = f"the {self._half} half {cls.__name__}" if self._half else f"{self._kind} {cls.__name__}"
        for member in sorted(members - known):
            raise ConfigError(f"{unknown(f'member of {label}', member, known)}; a member of its own begins with `_`")
        if missing := sorted(_public(self._protocols[0]) - members):
            raise ConfigError(
                f"{label} has no {' and no '.join(missing)}; expected the members of {self._protocols[0].__name__}"
            )

    def _plugin(self, name: str, allowed: Container[str] | None = None) -> MethodPlugin:
        """A method that is not registered; errors as of `build`."""
        plugin = load(PluginKind.METHOD, name, self._classes, allowed)
        return check_type(plugin, MethodPlugin, f"{self._kind} '{name}'")

    def _go_home(self) -> None:
        if self._home:
            importlib.import_module(self._home)


def _fields(cls: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _public(cls: type[Any]) -> set[str]:
    """The members that a class itself declares."""
    return {name for name in {*vars(cls), *vars(cls).get("__annotations__", {})} if not name.startswith("_")}
