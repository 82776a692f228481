"""Classes by name, registered or of plug-ins; an unknown name is an error, never a default."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from protofed.common.errors import ConfigError, short, unknown
from protofed.common.plugins import MethodPlugin, PluginKind, check_type, import_object, is_allowed, load

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
    """

    name: str
    title: str
    source: str = ""
    client_options: tuple[str, ...] = ()
    sends_nothing: bool = False

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
    """

    def __init__(
        self,
        kind: str,
        half: Literal["client", "server"] | None = None,
        home: str = "",
        protocols: Sequence[type] | None = None,
    ) -> None:
        self._kind, self._half, self._home = kind, half, home
        self._protocols = protocols
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
                return Method(name, plugin.title or name, plugin.source, plugin.client_options)
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
        if self._half is None:
            raise unknown(self._kind, name, self._classes)
        label, plugin = f"{self._kind} '{name}'", self._plugin(name, allowed)
        path = plugin.client if self._half == "client" else plugin.server
        cls: type[T] = import_object(path, label) if ":" in path else self.get(path)
        if not isinstance(cls, type) or not hasattr(cls, "__dataclass_fields__"):
            raise ConfigError(f"{label}: {path} is no dataclass; expected the {self._half} half of a method")
        self._check_members(cls)
        return cls, {*plugin.client_options, *plugin.server_options} - _fields(cls)

    def _check_members(self, cls: type[Any]) -> None:
        """Raises ConfigError: it has a member that no protocol knows, or lacks one that each half must have."""
        if self._protocols is None:
            return
        known = _fields(cls).union(*map(_public, self._protocols))
        members = _fields(cls).union(*map(_public, cls.__mro__[:-1]))
        label = f"the {self._half} half {cls.__name__}"
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
