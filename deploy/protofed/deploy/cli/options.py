"""Options that several commands share, and what a daemon's command sets up first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protofed.deploy.logs import setup

State = Annotated[Path | None, typer.Option(help="Folder for everything that must survive.")]
Settings = Annotated[Path | None, typer.Option(help="TOML file; the environment and these options override it.")]
Metrics = Annotated[str | None, typer.Option(help="host:port of /metrics, /healthz, /readyz; port 0 takes a free one.")]
UntilFinished = Annotated[bool, typer.Option("--until-finished", help="End when no run is left.")]
RunningState = Annotated[Path, typer.Option("--state", help="The daemon's state folder; the daemon has --metrics.")]


def log_as_daemon(context: typer.Context) -> None:
    """Log as a process that lives on: its log is all that is known of it."""
    setup.configure(debug=bool(context.find_root().params.get("debug")), daemon=True)


def health(state: RunningState) -> None:
    """Ask a running daemon whether it is ready: ends with 0, or with 1 and one line of what it lacks."""
    from protofed.deploy.daemons import readyz

    raise typer.Exit(readyz.report(state))
