"""`protofed tracking sync`: tell an experiment tracker of runs that a state folder holds."""

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
TensorBoard = Annotated[Path | None, typer.Option(help="Folder for TensorBoard's event files, of every run one.")]


tracking = typer.Typer(no_args_is_help=True, help="Experiment trackers: TensorBoard and MLflow.")


@tracking.command("sync")
def sync(
    run: Annotated[str | None, typer.Argument(help="The run's name; may be left out where there is only one.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All runs that there are.")] = False,
    state: Annotated[
        Path | None, typer.Option(help="State folder of a server (it may run), of `simulate`, or a job of `compare`.")
    ] = None,
    tensorboard: TensorBoard = None,
    mlflow: Annotated[str | None, typer.Option(help="URI of MLflow: http(s)://…, or sqlite:///FILE.")] = None,
) -> None:
    """Tell TensorBoard or MLflow what they do not have yet of runs: each round once, however often this is called."""
    from protofed.deploy.logs import setup
    from protofed.deploy.state_folder import open_state
    from protofed.deploy.tracking import follower

    setup.hide(urls=(mlflow,))
    if state is None:
        raise ConfigError("say by --state where the runs are: the folder of a server, or of `simulate`")
    trackers = follower.trackers(tensorboard, mlflow)
    if not trackers:
        raise ConfigError("say whom to tell: --tensorboard FOLDER, --mlflow URI, or both")
    with open_state(state) as there:
        for row in _wanted(there, run, everything=everything):
            for tracker in trackers:
                with tracker.open(row) as book:
                    new = follower.sync_run(there.ledger, row, book)
                    rounds = len(book.tracked.attempts)
                told = f"{row.run}: {new} new of {rounds} rounds told to {tracker.name}"
                console.print(told, soft_wrap=True, highlight=False, markup=False)


def _wanted(there: StateFolder, run: str | None, *, everything: bool) -> Sequence[RunRow]:
    rows = there.ledger.runs()
    if everything:
        return rows
    name = there.run(run)
    return [row for row in rows if row.run == name]
