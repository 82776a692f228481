"""`protofed server …`: the aggregation server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from protofed.common.errors import ConfigError, UnavailableError
from protofed.deploy.cli import completion, doctor
from protofed.deploy.cli.init import init_server
from protofed.deploy.cli.options import (
    AsJson,
    DryRun,
    Metrics,
    Set,
    Settings,
    State,
    UntilFinished,
    health,
    log_as_daemon,
    show_dry_run,
)
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
    from protofed.common.process import quick_imports

    with quick_imports():
        from protofed.common.config.settings import ServerSettings, read_settings
        from protofed.common.process import keep_memory
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


def notify(settings: Settings = None, as_json: AsJson = False) -> None:
    """Send a test message by each webhook and mail server of the settings. Exit code 69 if one does not take it.

    Example: `protofed server notify --settings server.toml`
    """
    from protofed.common.config.settings import ServerSettings, read_settings
    from protofed.common.pki.certificate import Party
    from protofed.common.pki.identity import LiveIdentity
    from protofed.deploy.daemons.server import server_name
    from protofed.deploy.logs import setup
    from protofed.server.notifications.channels import NotSentError, open_channels
    from protofed.server.notifications.wording import trial_notice

    server = read_settings(ServerSettings, settings, {})
    if server.notify is None:
        raise ConfigError("the settings have no [notify], so nobody is told; name the server's file: --settings FILE")
    setup.hide_server(server)
    channels = open_channels(server.notify)
    identity = None if server.identity is None else LiveIdentity(server.identity, Party.SERVER)
    message = trial_notice(server_name(identity, server.listen), time.time())
    results = dict[str, tuple[bool, str]]()
    for channel in channels:
        with Console(stderr=True).status(f"sending to {channel.name}"):
            try:
                results[channel.name] = True, channel.send(message)
            except NotSentError as error:
                results[channel.name] = False, str(error)
    if as_json:
        rows = [{"channel": name, "taken": taken, "answer": answer} for name, (taken, answer) in results.items()]
        print(json.dumps({"id": message.id, "channels": rows}, indent=2, ensure_ascii=False))  # noqa: T201
    else:
        for name, (taken, answer) in results.items():
            mark = Text("✓", style="green") if taken else Text("✗", style="bold red")
            console.print(Text.assemble(mark, f" {name}  {answer}"))
    if not all(taken for taken, _ in results.values()):
        raise typer.Exit(UnavailableError.exit_code)


server.command("doctor")(doctor.of_server(start))
server.command("health")(health)
server.command("notify")(notify)
