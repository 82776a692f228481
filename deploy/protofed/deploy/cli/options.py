"""Options and logging that the daemons' commands share, and `health`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from protofed.common.errors import ConfigError

if TYPE_CHECKING:
    from protofed.common.config.recipe import Recipe

_console, _errors = Console(), Console(stderr=True)
SELDOM = "Seldom needed"  # the last panel of `--help`
State = Annotated[Path | None, typer.Option(help="Folder for everything that must survive a restart.")]
Settings = Annotated[Path | None, typer.Option(help="TOML file; environment variables and options override it.")]
Metrics = Annotated[str | None, typer.Option(help="host:port of /metrics, /healthz, /readyz; port 0 picks a free one.")]
UntilFinished = Annotated[bool, typer.Option("--until-finished", help="Exit when no run is left.")]
# A text: a path would lose the "./" that tells a file from a name.
POLICY_HELP = "what the site may send: standard, strict, open, or a file."
Policy = Annotated[str | None, typer.Option(metavar="NAME|FILE", help=f"The site's policy, {POLICY_HELP}")]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
RunningState = Annotated[Path, typer.Option("--state", help="State folder of a daemon that runs with --metrics.")]


def log_as_daemon(context: typer.Context) -> None:
    """Switch to the log format of a long-running process; `--debug` of the root command still counts."""
    from protofed.deploy import logs

    logs.configure(debug=bool(context.find_root().params.get("debug")), daemon=True)


def health(state: RunningState, as_json: AsJson = False) -> None:
    """Check that a running server or site's daemon is ready. Exit code 0, or 1 and one line that says what is missing.

    Example: `protofed health --state state`
    """
    from protofed.deploy.daemons import readyz

    raise typer.Exit(readyz.report(state, as_json=as_json))


Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="KEY=VALUE in TOML, as plan.lr=0.1: replace a key of the recipe; KEY= removes it. May be repeated.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Check and print the recipe, its sites and what they send; start and write nothing."
    ),
]
DryWrite = Annotated[
    bool, typer.Option("--dry-run", help="Do all the work, print what would be written, and write nothing.")
]


def show_dry_run(recipes: Sequence[Recipe], *, simulated: bool) -> None:
    """Print each recipe as TOML, one key per line, with comments on its sites and on what a site sends.

    Args:
        simulated: the sites are those of the recipe's [data]; else daemons, which have data of their own.

    Raises:
        ConfigError: an unknown method, model or option, or a simulation of a recipe without [data].
    """
    from protofed.deploy.shipped import leaves
    from protofed.deploy.site.plan_request import planned_lines

    for recipe in recipes:
        if simulated and recipe.data is None:
            raise ConfigError(f"recipe '{recipe.name}' has no [data]; a simulation needs to know what its sites hold")
        about = (_title(recipe), _sites(recipe, simulated=simulated), *_outgoing(recipe), *planned_lines(recipe))
        for line in about:
            typer.echo(f"# {line}")
        for key, value in leaves(recipe.model_dump(mode="json", exclude_none=True)):
            typer.echo(f"{key} = {json.dumps(value, ensure_ascii=False)}")


def needs_recipe(assignments: Sequence[str] | None, option: str) -> None:
    """Refuse `--set` when no recipe was given. Called by commands whose recipe is optional.

    Args:
        option: what to add, as named in the error.

    Raises:
        ConfigError: there are assignments.
    """
    if assignments:
        raise ConfigError(f"--set changes a recipe, and none was given; add {option}")


def _title(recipe: Recipe) -> str:
    return f"{recipe.name}: {recipe.rounds} rounds of {recipe.method.name}, model {recipe.model.name}"


def _sites(recipe: Recipe, *, simulated: bool) -> str:
    federation = recipe.federation
    if simulated and recipe.data is not None:
        partition = recipe.data.partition
        sites = getattr(partition, "sites", None)
        count = f"{sites} and an evaluator" if sites else "as the data define them, and an evaluator"
        held_out = f", the last {apart} held out" if (apart := recipe.data.held_out_sites) else ""
        return f"sites: {count}, of {recipe.data.source} data, partition {partition.kind}{held_out}"
    required = f", {', '.join(federation.required_sites)} among them" if federation.required_sites else ""
    return f"sites: all that take part; a round opens with at least {federation.min_sites} trainers{required}"


def _outgoing(recipe: Recipe) -> Iterator[str]:
    """What a site with all classes sends if its policy allows everything.

    Without PyTorch, as on a server, one line says that this was not checked.
    """
    try:
        from protofed.deploy.simulation.simulation import everything
        from protofed.deploy.site.plan import site_plan
    except ModuleNotFoundError as error:
        yield f"not checked: method, model, and what a site sends; {error.name} is not installed here"
        return
    plan = site_plan(recipe, everything(recipe))
    parts = ", ".join(dict.fromkeys(tensor.spec.part.value for tensor in plan.outgoing)) or "no tensors"
    count = " and the number of examples" if plan.count_needed else ""
    size = f"{plan.sent_bytes[1]:,} bytes"
    masked = f"as one masked vector, {size}" if plan.masked is not None else f"at most {size}"
    yield f"a site sends each round: {parts}{count}; {masked}"
    for how, scores in (("as numbers", plan.released), ("only in a secure aggregation", plan.aggregated)):
        for of, names in scores.items():
            if names:
                yield f"a site sends {how}, {of}: {', '.join(names)}"
    yield "a site's policy can withhold each of these: `protofed client preview RECIPE --policy standard`"


def say(line: object, *, remark: bool = False) -> None:
    """Print a line as it is, however long: names and paths are no markup.

    Args:
        remark: beside the result, on standard error.
    """
    (_errors if remark else _console).print(line, markup=False, highlight=False, soft_wrap=True)


def print_json(value: object, *, ascii: bool = True) -> None:
    """Print a result for programs.

    Args:
        ascii: other letters are escaped.
    """
    print(json.dumps(value, indent=2, ensure_ascii=ascii))  # noqa: T201


Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def confirm(question: str) -> None:
    """Return only if the person at the terminal agrees.

    Raises:
        ConfigError: there is nobody to ask.
        typer.Abort: the person declined.
    """
    if not sys.stdin.isatty():
        raise ConfigError(f"no terminal to ask on: “{question}”; give --yes if that is what you want")
    typer.confirm(question, abort=True, err=True)
