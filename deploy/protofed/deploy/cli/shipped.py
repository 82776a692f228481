"""`protofed policies` and `protofed recipes`: what comes with protofed, to be read, copied and named."""

from __future__ import annotations

import tomllib
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from protofed.common.errors import ConfigError, count
from protofed.common.plugins import PluginKind
from protofed.deploy.cli import completion
from protofed.deploy.cli.options import AsJson, print_json, say
from protofed.deploy.tables import Column, terminal

console = Console()
BUILT_IN = ("digits", "spiral")  # data that are there without a download
HIDDEN = ("method", "model", "rounds")  # of a recipe, in JSON only


def policies(
    name: Annotated[
        str | None,
        typer.Argument(help="The policy to print; default: list them.", autocompletion=completion.policies),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the policies that come with protofed, the strictest first, or print one with its comments.

    You can use a name wherever a policy's file is expected.

    Example: `protofed policies standard`, with ` > policy.toml` after it to copy it
    """
    from protofed.deploy import shipped

    if name is not None:
        _show(shipped.named("policy", name), as_json)
        return
    files = shipped.files("policies")
    _print([{"name": name, "what": shipped.what(files[name])} for name in ("strict", "standard", "open")], as_json)


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="The recipe to print; with --resolved a file, too. Default: list them.",
            autocompletion=completion.recipes,
        ),
    ] = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Merge in what it extends: one file that needs no other.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the recipes that come with protofed, or print one with its comments.

    The first ones need no download. You can use a name wherever a recipe's file is expected.

    Example: `protofed recipes digits-fedprp --resolved`, with ` > mine.toml` after it to copy it
    """
    from protofed.deploy import shipped

    if name is None:
        if resolved:
            raise ConfigError("--resolved prints one recipe; name it, as `protofed recipes` lists them")
        rows = [_recipe_row(name, file) for name, file in shipped.files("recipes").items()]
        _print(sorted(rows, key=lambda row: row["data"] not in BUILT_IN), as_json)
        return
    if resolved:
        _show_text(shipped.resolved(name), as_json)
        return
    _show(file := shipped.named("recipe", name), as_json)
    if base := shipped.extends(file):
        note = f"it extends {base}: a copy needs that file beside it (`protofed recipes {Path(base).stem}`)"
        typer.echo(f"protofed: {note}, or use --resolved", err=True)


def _show(file: Path, as_json: bool) -> None:
    _show_text(file.read_text(encoding="utf-8"), as_json)


def _show_text(toml: str, as_json: bool) -> None:
    if as_json:
        print_json(tomllib.loads(toml), ascii=False)
    else:
        typer.echo(toml, nl=False)


def _recipe_row(name: str, file: Path) -> dict[str, Any]:
    from protofed.deploy import shipped

    recipe = shipped.recipe(name)
    data = "" if recipe.data is None else recipe.data.source
    facts = {"method": recipe.method.name, "model": recipe.model.name, "data": data, "rounds": recipe.rounds}
    return {"name": name, **facts, "what": shipped.what(file)}


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows, ascii=False)
        return
    columns = [Column(key, itemgetter(key), wraps=key == "what") for key in rows[0] if key not in HIDDEN]
    console.print(terminal(columns, rows))


def files(
    into: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Folder to write into.")] = None,
    kind: Annotated[list[str] | None, typer.Argument(metavar="[KIND]...", help="Of --list; default: all.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the kinds of files; write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write dashboards, alert rules, systemd units, Helm chart and Compose files into a folder. Overwrites nothing.

    Example: `protofed files monitoring dashboards prometheus`
    """
    from protofed.deploy.shipped import KINDS, write_files

    if listed:
        rows = [{"kind": name, "what": one.what} for name, one in KINDS.items()]
        if as_json:
            print_json(rows)
        else:
            columns = [Column(key, itemgetter(key), wraps=True) for key in ("kind", "what")]
            console.print(terminal(columns, rows))
        return
    if into is None:
        raise ConfigError("DIR is missing: the folder to write into; --list names the kinds of files")
    written = write_files(into, kind or ())
    if as_json:
        print_json([str(path) for path in written])
        return
    for path in written:
        say(path)
    say(f"{count(len(written), 'file')} written" + ("" if written else ": all are there already"))


new = typer.Typer(no_args_is_help=True, help="Start a package of your own from a template.")


PackageName = Annotated[str, typer.Argument(help="Its name in recipes: lower-case letters, digits and hyphens.")]
PackageInto = Annotated[Path, typer.Option("--into", help="Folder in which to create the package's folder.")]


@new.command("method")
def method(name: PackageName, into: PackageInto = Path()) -> None:
    """Create a package for your own method: both algorithms, recipe, tests, entry point. It starts as FedAvg.

    Example: `protofed new method my-method`
    """
    _create(PluginKind.METHOD, name, into)


@new.command("dataset")
def dataset(name: PackageName, into: PackageInto = Path()) -> None:
    """Create a package for your own images: a PyTorch dataset, recipe, tests, entry point. It starts with digits.

    Example: `protofed new dataset my-scans`
    """
    _create(PluginKind.DATASET, name, into)


@new.command("model")
def model(name: PackageName, into: PackageInto = Path()) -> None:
    """Create a package for your own model: a PyTorch module, recipe, tests, entry point. It starts as a small CNN.

    Example: `protofed new model my-net`
    """
    _create(PluginKind.MODEL, name, into)


@new.command("task")
def task(name: PackageName, into: PackageInto = Path()) -> None:
    """Create a package for your own task: options, client class, recipe, tests, entry point. It starts with grades.

    Example: `protofed new task my-grades`
    """
    _create(PluginKind.TASK, name, into)


def _create(kind: PluginKind, name: str, into: Path) -> None:
    from protofed.deploy.templates.new import new_package

    for path in (files := new_package(kind, name, into)):
        say(path)
    root = files[0].parent
    say(f"next: pip install -e '{root}[test]'\nthen: pytest {root}")
