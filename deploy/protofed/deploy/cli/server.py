"""`protofed server …`: the aggregation server. `protofed tracking sync`: copies its runs to an experiment tracker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from protofed.common.address import find_folder
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
    print_json,
    say,
    show_dry_run,
)

if TYPE_CHECKING:
    from protofed.deploy.state_folder import StateFolder
    from protofed.server.storage.rows import RunRow

server = typer.Typer(
    no_args_is_help=True, help="For coordinators: start the aggregation server, check its prerequisites and health."
)
tracking = typer.Typer(no_args_is_help=True, help="Copy runs to an experiment tracker: TensorBoard or MLflow.")
console = Console(soft_wrap=True)
TensorBoard = Annotated[
    Path | None, typer.Option(help="Folder for TensorBoard's event files, with a subfolder per run.")
]


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
        str | None,
        typer.Option(
            metavar="FOLDER|none",
            help="Folder with the server's cert.pem, key.pem, ca.pem and operators/*.pem; none: no TLS, loopback only.",
        ),
    ] = None,
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
    options: dict[str, Any] = {"recipes": recipe, "listen": listen, "state": state, "metrics": metrics}
    options |= {"identity": identity, "tensorboard": tensorboard}
    server_settings = read_settings(ServerSettings, settings, options)
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
        on_start=lambda address: console.print(
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
    from protofed.deploy import logs
    from protofed.deploy.daemons.server import server_name
    from protofed.server.notifications.channels import NotSentError, open_channels
    from protofed.server.notifications.wording import trial_notice

    server = read_settings(ServerSettings, settings, {})
    if server.notify is None:
        raise ConfigError("the settings have no [notify], so nobody is told; name the server's file: --settings FILE")
    logs.hide_server(server)
    channels = open_channels(server.notify)
    folder = find_folder(server.identity)
    identity = None if folder is None else LiveIdentity(folder, Party.SERVER)
    message = trial_notice(server_name(identity, server.listen), time.time())
    results = dict[str, tuple[bool, str]]()
    for channel in channels:
        with Console(stderr=True).status(f"sending to {channel.name}"):
            try:
                results[channel.name] = True, channel.send(message)
            except NotSentError as error:
                results[channel.name] = False, str(error)
    if as_json:
        rows = [{"channel": name, "taken": accepted, "answer": answer} for name, (accepted, answer) in results.items()]
        print_json({"id": message.id, "channels": rows}, ascii=False)
    else:
        for name, (accepted, answer) in results.items():
            mark = Text("✓", style="green") if accepted else Text("✗", style="bold red")
            console.print(Text.assemble(mark, f" {name}  {answer}"))
    if not all(accepted for accepted, _ in results.values()):
        raise typer.Exit(UnavailableError.exit_code)


@tracking.command("sync")
def sync(
    run: Annotated[str | None, typer.Argument(help="The run's name; optional if --state holds only one run.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All runs in --state.")] = False,
    state: Annotated[
        Path | None,
        typer.Option(help="State folder of a server (it may be running), of `simulate`, or a job of `compare`."),
    ] = None,
    tensorboard: TensorBoard = None,
    mlflow: Annotated[
        str | None,
        typer.Option(envvar="PROTOFED_TRACKING_MLFLOW", help="URI of MLflow: http(s)://…, or sqlite:///FILE."),
    ] = None,
) -> None:
    """Copy new rounds to TensorBoard or MLflow. Each round is copied once, however often you call this.

    Example: `protofed tracking sync --state runs/demo/server --all --tensorboard tensorboard`
    """
    from protofed.deploy import logs
    from protofed.deploy.state_folder import open_state
    from protofed.deploy.tracking import follower

    logs.hide(urls=(mlflow,))  # before anything logs it: the address, from the environment, may contain a password
    if state is None:
        raise ConfigError("say by --state where the runs are: the folder of a server, or of `simulate`")
    trackers = follower.trackers(tensorboard, mlflow)
    if not trackers:
        raise ConfigError("expected a tracker: --tensorboard FOLDER, --mlflow URI, or both")
    with open_state(state) as folder:
        for row in _chosen_rows(folder, run, everything=everything):
            for tracker in trackers:
                with tracker.open(row) as book:
                    new = follower.sync_run(folder.ledger, row, book)
                    rounds = len(book.tracked.attempts)
                say(f"{row.run}: {new} new of {rounds} rounds sent to {tracker.name}")


def _chosen_rows(folder: StateFolder, run: str | None, *, everything: bool) -> Sequence[RunRow]:
    rows = folder.ledger.runs()
    if everything:
        return rows
    name = folder.run(run)
    return [row for row in rows if row.run == name]


server.command("doctor")(doctor.of_server(start))
server.command("health")(health)
server.command("notify")(notify)
