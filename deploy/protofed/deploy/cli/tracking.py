"""`protofed tracking sync`: copy runs of a state folder to an experiment tracker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from protofed.common.errors import ConfigError

if TYPE_CHECKING:
    from protofed.deploy.state_folder import StateFolder
    from protofed.server.storage.rows import RunRow

console = Console()
TensorBoard = Annotated[
    Path | None, typer.Option(help="Folder for TensorBoard's event files, with a subfolder per run.")
]


tracking = typer.Typer(no_args_is_help=True, help="Copy runs to an experiment tracker: TensorBoard or MLflow.")


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
    from protofed.deploy.logs import setup
    from protofed.deploy.state_folder import open_state
    from protofed.deploy.tracking import follower

    setup.hide(urls=(mlflow,))  # before anything logs it: the address, from the environment, may contain a password
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
                line = f"{row.run}: {new} new of {rounds} rounds sent to {tracker.name}"
                console.print(line, soft_wrap=True, highlight=False, markup=False)


def _chosen_rows(folder: StateFolder, run: str | None, *, everything: bool) -> Sequence[RunRow]:
    rows = folder.ledger.runs()
    if everything:
        return rows
    name = folder.run(run)
    return [row for row in rows if row.run == name]
