"""`make compatibility`: the names that docs/explanation/compatibility.md promises to keep, as the code has them.

The golden list is by topic and key: the names of a module, a command's options, the paths of a file's keys, …
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor
from pydantic import BaseModel
from tests.checkout import ROOT

from protofed.client.agent.metrics import METRICS as CLIENT_METRICS
from protofed.client.method import client_methods
from protofed.client.models.catalogue import architectures
from protofed.client.policy.rules import PolicyRules
from protofed.common import errors
from protofed.common.config.recipe import Recipe
from protofed.common.config.settings import ClientSettings, ServerSettings
from protofed.common.deprecated import COMMANDS, KEYS
from protofed.common.plugins import Registry
from protofed.deploy.cli.main import app
from protofed.deploy.doctor.checks import DIAGNOSES
from protofed.deploy.operator.snapshot import RunSnapshot
from protofed.protos.v1 import federation_pb2, operator_pb2, secure_aggregation_pb2
from protofed.server.method import server_methods
from protofed.server.metrics import METRICS as SERVER_METRICS
from protofed.testing.conformance import MethodConformance
from protofed.testing.task_conformance import TaskConformance

GOLDEN = ROOT / "tests/golden/compatibility.json"
FACES = (
    "protofed.models",
    "protofed.data",
    "protofed.tasks",
    "protofed.lab",
    "protofed.client.method",
    "protofed.server.method",
)
SUITES = (MethodConformance, TaskConformance)
FILES = (Recipe, PolicyRules, ServerSettings, ClientSettings)
PROTOS = (federation_pb2, operator_pb2, secure_aggregation_pb2)
Names = Mapping[str, list[str]]


def collect(*, hidden: bool = False) -> dict[str, Names]:
    """All names, by topic and key.

    Args:
        hidden: with commands and options that no help shows: they are not promised, but they still work.
    """
    return {topic: _sorted(pairs) for topic, pairs in _topics(hidden).items()}


def find_missing(promised: Mapping[str, Names], now: Mapping[str, Names]) -> list[str]:
    """What was promised and is no longer there, a line each."""
    return [
        f"{topic}: {key} {name}".rstrip()
        for topic, keys in promised.items()
        for key, names in keys.items()
        for name in (names if key in now.get(topic, {}) else [""])
        if name not in now.get(topic, {}).get(key, ())
    ]


def read_golden(path: Path = GOLDEN) -> dict[str, dict[str, list[str]]]:
    """The golden list."""
    golden: dict[str, dict[str, list[str]]] = json.loads(path.read_text(encoding="utf-8"))
    return golden


def _topics(hidden: bool) -> dict[str, Iterable[tuple[str, Iterable[str]]]]:
    return {
        "python": _faces(),
        "exit codes": _exit_codes(),
        "commands": _commands(typer.main.get_command(app), "protofed", hidden),
        "keys": ((file.__name__, (*_paths(file), *_old_keys(file))) for file in FILES),
        "methods": ((name, _options(client_methods, server_methods, name=name)) for name in client_methods),
        "models": ((name, _options(architectures, name=name)) for name in architectures),
        "metrics": ((metric.name, metric.labels) for metric in (*SERVER_METRICS, *CLIENT_METRICS)),
        "protocol": (pair for module in PROTOS for pair in _file(module.DESCRIPTOR)),
        "json": (
            ("runs show", _fields(operator_pb2.RunDetail.DESCRIPTOR)),
            ("runs watch", ("event", *_paths(RunSnapshot))),
        ),
    }


def _sorted(pairs: Iterable[tuple[str, Iterable[str]]]) -> Names:
    found: dict[str, set[str]] = {}
    for key, names in pairs:
        found.setdefault(key, set()).update(names)
    return {key: sorted(names) for key, names in sorted(found.items())}


# Each topic


def _faces() -> Iterator[tuple[str, Iterable[str]]]:
    for name in FACES:
        module = importlib.import_module(name)
        yield name, (one for one in module.__all__ if hasattr(module, one))
    for suite in SUITES:
        shown = (*vars(suite), *suite.__annotations__)
        kept = (one for one in shown if not one.startswith(("_", "test_", "pytest")))  # tests come and go
        yield f"{suite.__module__}.{suite.__name__}", kept


def _exit_codes() -> Iterator[tuple[str, Iterable[str]]]:
    yield "finding", (f"{one.name} {one.code}" for one in DIAGNOSES.values())
    known = (one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.ProtofedError))
    yield "error", (f"{one.__name__} {one.exit_code}" for one in known if "exit_code" in vars(one))


def _commands(command: Any, path: str, hidden: bool) -> Iterator[tuple[str, Iterable[str]]]:
    yield path, _command_options(command, hidden)
    for name, inner in getattr(command, "commands", {}).items():
        if hidden or not inner.hidden:
            yield from _commands(inner, f"{path} {name}", hidden)
    for old, renamed in COMMANDS.items():
        if path == f"protofed {renamed.new}":
            yield f"protofed {old}", _command_options(command, hidden)


def _command_options(command: Any, hidden: bool) -> list[str]:
    options = [one for one in command.params if one.param_type_name == "option" and (hidden or not one.hidden)]
    return [name for one in options for name in (*one.opts, *one.secondary_opts)]


def _old_keys(file: type[BaseModel]) -> list[str]:
    return [path for kind, path in KEYS if kind == file.__name__]


def _options(*registries: Registry[Any], name: str) -> list[str]:
    return [field.name for one in registries for field in dataclasses.fields(one.get(name)) if field.init]


def _file(file: FileDescriptor) -> Iterator[tuple[str, Iterable[str]]]:
    for message in file.message_types_by_name.values():
        yield from _message(message)
    for enum in file.enum_types_by_name.values():
        yield _enum(enum)
    for service in file.services_by_name.values():
        calls = (f"{one.name}({one.input_type.name}) {one.output_type.name}" for one in service.methods)
        yield service.full_name, calls


def _message(message: Descriptor) -> Iterator[tuple[str, Iterable[str]]]:
    yield message.full_name, (f"{field.name} = {field.number}" for field in message.fields)
    for enum in message.enum_types:
        yield _enum(enum)
    for inner in message.nested_types:
        if not inner.GetOptions().map_entry:
            yield from _message(inner)


def _enum(enum: EnumDescriptor) -> tuple[str, Iterable[str]]:
    return enum.full_name, [f"{value.name} = {value.number}" for value in enum.values]


# Paths of keys, as "plan.dp.epsilon"


def _fields(message: Descriptor, before: str = "") -> Iterator[str]:
    """Of a message that is printed as JSON."""
    for field in message.fields:
        yield f"{before}{field.name}"
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from _fields(field.message_type, f"{before}{field.name}.")


def _paths(cls: type[Any], before: str = "") -> Iterator[str]:
    """Of a pydantic model or a dataclass, with those of tables in it."""
    if issubclass(cls, BaseModel):
        fields = {one.alias or name: one.annotation for name, one in cls.model_fields.items()}
    else:
        hints = typing.get_type_hints(cls)
        fields = {one.name: hints[one.name] for one in dataclasses.fields(cls)}
    for name, hint in fields.items():
        yield f"{before}{name}"
        for inner in _tables(hint):
            yield from _paths(inner, f"{before}{name}.")


def _tables(hint: Any) -> Iterator[type[Any]]:
    """The models and dataclasses that a type has in it."""
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        if issubclass(hint, BaseModel) or dataclasses.is_dataclass(hint):
            yield hint
        return
    for inner in typing.get_args(hint):
        yield from _tables(inner)


def text(names: Mapping[str, Names]) -> str:
    """The golden list: a line for each key, so that a change of one shows."""
    topics = (
        f'"{topic}": {{\n' + ",\n".join(f"{json.dumps(key)}: {json.dumps(of)}" for key, of in keys.items()) + "\n}"
        for topic, keys in names.items()
    )
    return "{\n" + ",\n".join(topics) + "\n}\n"


def main(say: Callable[[str], object] = sys.stderr.write) -> None:
    now = collect()
    for line in find_missing(read_golden(), now) if GOLDEN.exists() else ():
        say(f"no longer promised: {line}\n")
    GOLDEN.write_text(text(now), encoding="utf-8")


if __name__ == "__main__":
    main()
