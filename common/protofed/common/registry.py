"""Names to classes, by explicit lists: a name that nobody registered is an error, never a default."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from protofed.common.errors import ConfigError, short, unknown
from protofed.common.renamed import RENAMED

T = TypeVar("T")
C = TypeVar("C", bound=type[Any])


class Registry(Generic[T]):
    """Frozen dataclasses by name; their fields are the options that a recipe may set."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._classes: dict[str, type[Any]] = {}
        self._foreign: dict[str, tuple[str, ...]] = {}

    def register(self, *names: str, **names_with_options: tuple[str, ...]) -> Callable[[C], C]:
        """Enter a class under one or more names.

        Args:
            names: names whose options are all fields of this class.
            names_with_options: names with the options that the *other* half of the method takes, so that each
                half can tell a typo from an option that is not its own.
        """

        def enter(cls: C) -> C:
            for name, foreign in {**dict.fromkeys(names, ()), **names_with_options}.items():
                if name in self._classes:
                    raise ConfigError(f"{self._kind} '{name}' is registered twice")
                self._classes[name] = cls
                self._foreign[name] = foreign
            return cls

        return enter

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._classes))

    def get(self, name: str) -> type[T]:
        """The class of that name."""
        if name not in self._classes:
            raise unknown(self._kind, name, self._classes)
        return self._classes[name]

    def options(self, name: str) -> set[str]:
        """The options that the class of that name takes itself."""
        return {field.name for field in dataclasses.fields(self.get(name))}  # type: ignore[arg-type]

    def foreign(self, name: str) -> set[str]:
        """The options that are left to the other half."""
        return set(self._foreign[name])

    def build(self, name: str, options: Mapping[str, Any]) -> T:
        """An instance with these options, those of the other half left out.

        Raises:
            ConfigError: an unknown name or option (with the nearest known one), or a value out of range.
        """
        cls = self.get(name)
        own = self.options(name)
        known = own | self.foreign(name)
        for option in options:
            if (new := RENAMED.get(f"{self._kind}.{option}")) in known:
                raise ConfigError(f"unknown option '{option}' of {self._kind} {name}: it is called '{new}'")
            if option not in known:
                raise unknown(f"option of {self._kind} {name}", option, known or {"(none)"})
        try:
            return TypeAdapter(cls).validate_python({k: v for k, v in options.items() if k in own})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(step) for step in first["loc"])
            raise ConfigError(
                f"{self._kind} {name}: {where} = {short(repr(first['input']))}: {first['msg']}"
            ) from error
