"""`protofed server …`: the aggregation server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from protofed.deploy.cli import completion, doctor
from protofed.deploy.cli.init import init_server
from protofed.deploy.cli.options import Metrics, Settings, State, UntilFinished, health, log_as_daemon
from protofed.deploy.cli.overrides import DryRun, Set, show_dry_run
from protofed.deploy.cli.server_notify import notify
from protofed.deploy.cli.tracking import TensorBoard

server = typer.Typer(
    no_args_is_help=True, help="For coordinators: start the aggregation server, check its prerequisites and health."
)
console = Console(soft_wrap=True)


server.command("init")(init_server)


@server.command("start")
def start(
    context: typer.Context,
    settings: Settings = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="Recipe of a run: a file, or a shipped name. May be repeated; runs execute in this order.",
            autocompletion=completion.recipes,
        ),
    ] = None,
    listen: Annotated[str | None, typer.Option(help="host:port; port 0 picks a free one.")] = None,
    identity: Annotated[
        Path | None, typer.Option(help="Folder with the server's cert.pem, key.pem and ca.pem, and operators/*.pem.")
    ] = None,
    plaintext: Annotated[bool, typer.Option("--plaintext", help="No TLS; only on this machine.")] = False,
    state: State = None,
    metrics: Metrics = None,
    tensorboard: TensorBoard = None,
    until_finished: UntilFinished = False,
    recover: Annotated[
        bool,
        typer.Option("--recover", help="Start even though the ledger lost records that it had confirmed to sites."),
    ] = False,
    assignments: Set = None,
    dry_run: DryRun = False,
) -> None:
    """Run the aggregation server. Start runs with --recipe, or later with `protofed runs start`.

    Example: `protofed server start --settings server.toml --recipe recipe.toml`
    """
    from protofed.common.quick_imports import quick_imports

    with quick_imports():
        from protofed.common.config.settings import ServerSettings, read_settings
        from protofed.common.malloc import keep_memory
        from protofed.deploy.daemons.server import checked, run_server
        from protofed.deploy.simulation.start_check import check_queue

    if not dry_run:
        log_as_daemon(context)
        keep_memory()
    given: dict[str, Any] = {"recipes": recipe, "listen": listen, "state": state, "metrics": metrics}
    given |= {"identity": identity, "plaintext": plaintext or None, "tensorboard": tensorboard}
    server_settings = read_settings(ServerSettings, settings, given)
    if dry_run:
        recipes, _ = checked(server_settings, assignments or ())
        check_queue(recipes, known_models=True)
        show_dry_run(recipes, simulated=False)
        return
    run_server(
        server_settings,
        assignments or (),
        until_finished=until_finished,
        recover=recover,
        started=lambda address: console.print(
            f"listening on {address}, state in {server_settings.state}", soft_wrap=True
        ),
    )


server.command("doctor")(doctor.of_server(start))
server.command("health")(health)
server.command("notify")(notify)
