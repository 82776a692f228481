"""The parts of the documents that are made from the code: each stands between `<!-- generated: NAME -->` and
`<!-- end -->`.

`python -m docs.tables` writes them, as `make docs` does; with `--check` it only says which pages are stale.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import typer
from docs import markdown, method_tables
from docs.markdown import first_lines, table
from pydantic import BaseModel

from protofed.client.agent.metrics import METRICS as CLIENT_METRICS
from protofed.client.method import client_methods
from protofed.client.models.catalogue import architectures
from protofed.client.policy.rules import Limits, PolicyRules, PrivacyBudget, Window
from protofed.common import failpoint
from protofed.common.config import data, recipe, settings
from protofed.common.config.evaluation import Evaluation
from protofed.common.config.tables import Input
from protofed.common.config.transforms import OPTIONS, is_random
from protofed.common.monitoring import table as metrics_table
from protofed.common.protocol.messages import Telemetry
from protofed.deploy.cli.main import app
from protofed.deploy.doctor.checks import diagnoses_table
from protofed.server.method import server_methods
from protofed.server.metrics import METRICS as SERVER_METRICS

ROOT = Path(__file__).parents[1]
WINGS = ("common", "server", "client", "deploy")
VAST = 2.0**53  # a bound that only keeps out what does not fit into a float or 64 bits says nothing to a reader
PROTOS = ROOT / "protos/protofed/protos/v1"


# Keys: fields of pydantic models and dataclasses, with the comments at their lines


def comments(cls: type[Any]) -> dict[str, str]:
    """What the comment beside a field says, by field; the class's own fields only."""
    source = textwrap.dedent(inspect.getsource(cls))
    at = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith("# noqa")
    }
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    fields = [node for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {
        typing.cast("ast.Name", node.target).id: next(
            (at[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in at), ""
        )
        for node in fields
    }


def _kind(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        target = schema["$ref"].rsplit("/", 1)[-1]
        inner = defs[target]
        return _kind(inner, defs) if "enum" in inner else "table"
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            kinds = dict.fromkeys(_kind(one, defs) for one in schema[several])
            return " or ".join(kind for kind in kinds if kind != "none")
    if schema.get("type") == "array":
        items: Mapping[str, Any] = schema.get("items") or next(iter(schema.get("prefixItems", [{}])), {})
        return f"list of {_kind(items, defs)}"
    if schema.get("type") == "object":
        return "table"
    name = {"null": "none", "boolean": "true or false", "string": "text"}.get(schema.get("type", ""), "")
    name = name or str(schema.get("type", "any"))
    if schema.get("format") in ("path", "password"):
        name = {"path": "path", "password": "secret"}[schema["format"]]
    bounds = [
        f"{sign} {schema[key]:g}" if isinstance(schema[key], float) else f"{sign} {schema[key]}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in schema and abs(schema[key]) < VAST
    ]
    return f"{name} {', '.join(bounds)}".strip()


def _value(value: object) -> str:
    """A default, as TOML would have it."""
    if isinstance(value, BaseModel) or value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, frozenset | set | tuple | list):
        listed = [_value(one) for one in value]
        return f"[{', '.join(sorted(listed) if isinstance(value, frozenset | set) else listed)}]"
    if isinstance(value, Mapping):
        return "{ }" if not value else str(dict(value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, int) else f'"{value}"'


def keys(model: type[BaseModel], variable: str = "") -> str:
    """A model's keys: what they may be, their defaults, what they mean.

    Args:
        variable: prefix of the environment variables that may set them; none: nothing may.
    """
    meanings: dict[str, str] = {}
    schema = model.model_json_schema()
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls.__module__.startswith("protofed"):
            meanings |= comments(cls)
    defs, rows = schema.get("$defs", {}), []
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else f"`{value}`" if (value := _default(field)) else ""
        key = field.alias or name
        cells = [f"`{key}`", _kind(schema["properties"][key], defs), default]
        rows.append(
            [*cells, *([f"`{variable}{name.upper()}`"] if variable else []), field.description or meanings[name]]
        )
    return table(["key", "value", "default", *(["variable"] if variable else []), "meaning"], rows)


def _default(field: Any) -> str:
    return _value(field.get_default(call_default_factory=True))


def _tables(models: Iterable[tuple[str, type[BaseModel]]]) -> str:
    return "\n\n".join(
        f"### {title}\n\n{inspect.cleandoc(model.__doc__ or '')}\n\n{keys(model)}" for title, model in models
    )


def recipes() -> str:
    """Every key of a recipe."""
    tables: list[tuple[str, type[BaseModel]]] = [
        ("The recipe itself", recipe.Recipe),
        ("`[input]`", Input),
        ("`[plan]`", recipe.Plan),
        ("`[plan.dp]`", recipe.DpPlan),
        ("`[federation]`", recipe.Federation),
        ("`[evaluation]`", Evaluation),
        ("`[data]`", data.Data),
        ("`[data.dicomweb]`", data.DicomWeb),
    ]
    return _tables(tables)


def partitions() -> str:
    """`[data.partition]` by kind."""
    members = (typing.get_args(member) for member in typing.get_args(typing.get_args(data.Partition)[0]))
    return _tables((f'`kind = "{tag.tag}"`', model) for model, tag in members if tag.tag in data.KINDS)


def sources() -> str:
    """What `data.source` may be."""
    return ", ".join(f"`{name}`" for name in sorted(data.SOURCES))


def transforms() -> str:
    """What a recipe may name as a transform, with its options."""
    rows = [
        [
            f"`{name}`",
            "random" if is_random(name) else "deterministic",
            ", ".join(f"`{one}`" for one in sorted(options)),
        ]
        for name, options in OPTIONS.items()
    ]
    return table(["transform", "results", "options"], rows)


def policy() -> str:
    """Keys of a policy."""
    return keys(PolicyRules)


def budget() -> str:
    """Keys of a policy's `dp`."""
    return keys(PrivacyBudget)


def limits() -> str:
    """Keys of a policy's `[limits]`."""
    return keys(Limits)


def schedule() -> str:
    """Keys of a window of a policy's schedule."""
    return keys(Window)


def telemetry() -> str:
    """What heartbeats may carry."""
    return table(["telemetry", "what it discloses"], ([f"`{one}`", one.discloses] for one in Telemetry))


# Options of methods and models


def options() -> str:
    """Every option of `[method]`, by method."""
    pieces = []
    for name in client_methods:
        rows: dict[str, list[str]] = {}
        for half in (server_methods.get(name), client_methods.get(name)):
            rows |= {row[0]: row for row in _field_rows(half)}
        pieces.append(f"### {name}\n\n{_options_table(rows.values())}")
    return "\n\n".join(pieces)


def models() -> str:
    """Every model of `[model]` with its options."""
    known = {name: architectures.get(name) for name in architectures}
    return "\n\n".join(
        f"### {name}\n\n{first_lines(cls)}\n\n{_options_table(_field_rows(cls))}" for name, cls in known.items()
    )


def _options_table(rows: Iterable[list[str]]) -> str:
    body = list(rows)
    return table(["option", "value", "default", "meaning"], body) if body else "It has no options."


def _field_rows(cls: type[Any]) -> list[list[str]]:
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            meanings |= comments(base)
    hints = typing.get_type_hints(cls, include_extras=True)
    rows = []
    for field in dataclasses.fields(cls):
        if field.init:
            default = "required" if field.default is dataclasses.MISSING else f"`{_value(field.default)}`"
            rows.append([f"`{field.name}`", annotation(hints[field.name]), default, meanings.get(field.name, "")])
    return rows


def annotation(hint: Any) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return annotation(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{one}`" for one in arguments)
    if origin in (list, tuple, frozenset):
        return f"list of {annotation(arguments[0])}"
    if arguments:
        return " or ".join(annotation(one) for one in arguments if one is not type(None))
    names = {bool: "true or false", str: "text", int: "integer", float: "number", Path: "path"}
    return names.get(hint, str(getattr(hint, "__name__", hint)))


# Commands


def commands(at: Any = None, path: tuple[str, ...] = ("protofed",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that is shown in the help, groups before what is in them."""
    here = typer.main.get_command(app) if at is None else at
    yield path, here
    for name, command in getattr(here, "commands", {}).items():
        if not command.hidden:
            yield from commands(command, (*path, name))


def cli() -> str:
    """The reference of all commands."""
    return "\n\n".join(_command(path, command) for path, command in commands())


def _command(path: tuple[str, ...], command: Any) -> str:
    text = inspect.cleandoc(command.help or "").replace("\f", "")
    inside = getattr(command, "commands", None)
    if inside is not None:
        rows = [[f"`{name}`", _short(one.help)] for name, one in inside.items() if not one.hidden]
        return f"{'#' * (len(path) + 1)} {' '.join(path)}\n\n{text}\n\n{table(['command', 'what it does'], rows)}"
    usage = [_usage(one) for one in command.params if one.param_type_name == "argument"]
    pieces = [f"{'#' * (len(path) + 1)} {' '.join(path)}", f"```text\n{' '.join([*path, *usage])} [OPTIONS]\n```", text]
    if rows := [_parameter(one) for one in command.params if not one.hidden and one.name != "help"]:
        pieces.append(table(["option", "value", "default", "meaning"], rows))
    return "\n\n".join(pieces)


def _short(text: str | None) -> str:
    return " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())


def _usage(argument: Any) -> str:
    name = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _parameter(one: Any) -> list[str]:
    argument = one.param_type_name == "argument"
    names = ", ".join(f"`{name}`" for name in ([one.name.upper()] if argument else [*one.opts, *one.secondary_opts]))
    value = "" if one.__dict__.get("is_bool_flag") else annotation(one.type_descriptor.annotation)
    bounds = [f"{sign} {bound:g}" for sign, bound in (("≥", one.min), ("≤", one.max)) if bound is not None]
    default = "required" if one.required else _value(one.default) if one.default not in (None, False, ()) else ""
    meaning = (one.help or "") + (f" Variable `{one.envvar}`." if one.envvar else "")
    return [names, " ".join([value, *bounds]), f"`{default}`" if default not in ("", "required") else default, meaning]


# Protocol


def proto(name: str) -> str:
    """A .proto file, a section for each service, enum and message, with its comments."""
    text = (PROTOS / name).read_text(encoding="utf-8")
    head = [line.lstrip("/ ") for line in text.partition("syntax")[0].splitlines()]
    blocks = re.findall(
        r"((?:^//[^\n]*\n)*)^(service|enum|message) (\w+) (\{.*?^\}|\{\})", text, re.MULTILINE | re.DOTALL
    )
    pieces = ["\n".join(head).strip()]
    for comment, kind, title, body in blocks:
        about = " ".join(line.lstrip("/ ") for line in comment.splitlines())
        pieces.append(f"### {title}\n\n{about}\n\n```proto\n{kind} {title} {body}\n```")
    return "\n\n".join(pieces)


def rooms() -> str:
    """Every room of the code, with what its `__init__.py` says belongs there."""
    rows = []
    for wing in WINGS:
        for init in sorted((ROOT / wing / "protofed" / wing).glob("*/__init__.py")):
            text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
            rows.append([f"`{wing}/{init.parent.name}`", text.partition("\n\n")[0]])
    return table(["room", "what belongs there"], rows)


def failpoints() -> str:
    """The named places where a test may let a process die."""
    rows = [("server", failpoint.SERVER), ("daemon", failpoint.CLIENT), ("either", failpoint.JOURNAL)]
    rows += [("server, evaluator", failpoint.REFINEMENTS)]
    return table(["process", "failpoints"], ([process, ", ".join(f"`{one}`" for one in of)] for process, of in rows))


GENERATED: Mapping[str, Callable[[], str]] = {
    "cli": cli,
    "recipe": recipes,
    "partitions": partitions,
    "sources": sources,
    "transforms": transforms,
    "server-settings": lambda: keys(settings.ServerSettings, "PROTOFED_SERVER_"),
    "client-settings": lambda: keys(settings.ClientSettings, "PROTOFED_CLIENT_"),
    "monitoring-settings": lambda: keys(settings.Monitoring),
    "notify-settings": lambda: keys(settings.Notify),
    "smtp-settings": lambda: keys(settings.Smtp),
    "webhook-settings": lambda: keys(settings.Webhook),
    "policy": policy,
    "budget": budget,
    "limits": limits,
    "schedule": schedule,
    "telemetry": telemetry,
    "parts": method_tables.parts,
    "methods": method_tables.methods,
    "disclosures": method_tables.disclosures,
    "exports": method_tables.exports,
    "sums": method_tables.sums,
    "options": options,
    "models": models,
    "server-metrics": lambda: metrics_table(SERVER_METRICS),
    "client-metrics": lambda: metrics_table(CLIENT_METRICS),
    "doctor": diagnoses_table,
    "federation": lambda: proto("federation.proto"),
    "operator": lambda: proto("operator.proto"),
    "rooms": rooms,
    "failpoints": failpoints,
    **{f"halves-{name}": partial(method_tables.halves, name) for name in client_methods},
}


def fill(text: str) -> str:
    """A page's text, with each generated part as the code has it now."""
    return markdown.GENERATED.sub(
        lambda part: f"<!-- generated: {part[1]} -->\n\n{GENERATED[part[1]]().strip()}\n\n<!-- end -->", text
    )


def find_stale() -> dict[Path, str]:
    """The pages whose generated parts differ from what the code gives, with the text that they should have."""
    texts = {page: page.read_text(encoding="utf-8") for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]}
    return {page: new for page in sorted(texts) if (new := fill(texts[page])) != texts[page]}


def main(arguments: list[str]) -> int:
    """Write the stale pages; with `--check` name them and return 1."""
    stale = find_stale()
    if arguments == ["--check"]:
        if stale:
            names = ", ".join(page.relative_to(ROOT).as_posix() for page in stale)
            sys.stderr.write(f"stale, because the code has changed: {names}. `make docs` writes them anew.\n")
        return int(bool(stale))
    for page, text in stale.items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
