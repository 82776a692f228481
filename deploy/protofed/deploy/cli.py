"""The command line. Errors are one or two lines and an exit code; tracebacks only with --debug."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from protofed.common.errors import ProtofedError
from protofed.common.version import VERSION
from protofed.deploy import logs

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Federated learning for sites whose classes are skewed.",
    epilog="Exit codes: 0 done · 1 a run failed · 2 wrong arguments · 65 data · 69 server or port not to be had · "
    "70 internal · 74 state folder · 76 protocol or version · 77 policy · 78 recipe or setting · 130 interrupted",
)
console = Console()
State = Annotated[Path | None, typer.Option(help="Folder for everything that must survive.")]
Settings = Annotated[Path | None, typer.Option(help="TOML file; the environment and these options override it.")]
UntilFinished = Annotated[bool, typer.Option("--until-finished", help="End when no run is left.")]


def _version(asked: bool) -> None:
    if asked:
        console.print(f"protofed {VERSION}")
        raise typer.Exit


@app.callback()
def _global(
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks and debug logs.")] = False,
    version: Annotated[  # noqa: ARG001  (answered by its callback)
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    logs.configure(debug=debug)
    _Debug.on = debug


class _Debug:
    on = False


@app.command()
def server(
    settings: Settings = None,
    recipe: Annotated[list[Path] | None, typer.Option(help="Recipe of a run; several run one after the other.")] = None,
    listen: Annotated[str | None, typer.Option(help="host:port; port 0 takes a free one.")] = None,
    state: State = None,
    until_finished: UntilFinished = False,
) -> None:
    """Run the aggregation server."""
    from protofed.common.allocator import keep_memory
    from protofed.common.settings import ServerSettings, read_settings
    from protofed.deploy.processes import run_server

    keep_memory()
    given = {"recipes": recipe, "listen": listen, "state": state}
    said = read_settings(ServerSettings, settings, given)
    run_server(
        said,
        until_finished=until_finished,
        started=lambda address: console.print(f"listening on {address}, state in {said.state}"),
    )


@app.command()
def client(
    settings: Settings = None,
    site: Annotated[str | None, typer.Option(help="This site's id.")] = None,
    server: Annotated[str | None, typer.Option(help="host:port of the server.")] = None,
    policy: Annotated[Path | None, typer.Option(help="The site's policy: what may leave.")] = None,
    state: State = None,
    role: Annotated[list[str] | None, typer.Option(help="trainer, evaluator or both (twice).")] = None,
    share: Annotated[int | None, typer.Option(help="Which of data.partition's sites this is, from 0.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    until_finished: UntilFinished = False,
    give_up_after: Annotated[
        float | None, typer.Option(help="Seconds without an answer after which to end; else never.")
    ] = None,
) -> None:
    """Run one site's client daemon."""
    from protofed.common.allocator import keep_memory
    from protofed.common.settings import ClientSettings, read_settings
    from protofed.deploy.processes import run_client

    keep_memory()
    given: dict[str, Any] = {"site": site, "server": server, "policy": policy, "state": state, "roles": role}
    said = read_settings(ClientSettings, settings, {**given, "share": share, "device": device})
    run_client(said, until_finished=until_finished, give_up_after_s=give_up_after)


@app.command()
def simulate(
    recipe: Annotated[str, typer.Argument(help="A recipe's file, or the name of one that comes with protofed.")],
    state: Annotated[
        Path | None, typer.Option(help="Folder in which the simulation survives; an unfinished one in it goes on.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Run a recipe in one process: the same coordinator, agents and methods without the network."""
    from protofed.common.allocator import keep_memory
    from protofed.deploy.tables import scores_json, simulate_with_progress

    keep_memory()
    view = simulate_with_progress(recipe, state, device)
    if as_json:
        print(json.dumps(scores_json([view]), indent=2))  # noqa: T201


@app.command()
def demo(
    keep: Annotated[Path, typer.Option(help="Folder for the demo's state, logs and scores.")] = Path("runs/demo"),
) -> None:
    """A server and five sites on this machine: FedNH beside FedAvg and training alone, over gRPC."""
    from protofed.deploy.demo import run_demo

    run_demo(keep, console)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `protofed`; always ends in SystemExit."""
    try:
        app(arguments)
    except KeyboardInterrupt:
        sys.exit(130)
    except ProtofedError as error:
        _say(str(error), error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        _say(f"{error.name} is not installed: sites and simulations need pip install 'protofed[client]'", error)
        sys.exit(78)
    except Exception as error:
        _say(f"internal error: {type(error).__name__}: {error}; run again with --debug for details", error)
        sys.exit(70)


def _say(message: str, error: Exception) -> None:
    if _Debug.on:
        raise error
    print(f"protofed: {message}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
