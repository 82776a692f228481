"""`protofed server …`: the aggregation server. `protofed tracking` copies its runs to an experiment tracker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from protofed.common.errors import ConfigError
from protofed.deploy.cli import completion, doctor
from protofed.deploy.cli.init import init_server
from protofed.deploy.cli.options import (
    DryRun,
    Metrics,
    Set,
    Settings,
    State,
    UntilFinished,
    log_as_daemon,
    say,
    show_dry_run,
)

if TYPE_CHECKING:
    from protofed.deploy.state_folder import StateFolder
    from protofed.server.storage.rows import RunRow

server = typer.Typer(
    no_args_is_help=True, help="For coordinators: start the aggregation server, check its prerequisites."
)
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


def tracking(
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
    """Copy runs to TensorBoard or MLflow. Each round is copied once, however often you call this.

    Example: `protofed tracking --state runs/demo/server --all --tensorboard tensorboard`
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
