"""Options and logging that the daemons' commands share, and `health`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

State = Annotated[Path | None, typer.Option(help="Folder for everything that must survive a restart.")]
Settings = Annotated[Path | None, typer.Option(help="TOML file; environment variables and options override it.")]
Metrics = Annotated[str | None, typer.Option(help="host:port of /metrics, /healthz, /readyz; port 0 picks a free one.")]
UntilFinished = Annotated[bool, typer.Option("--until-finished", help="Exit when no run is left.")]
# A text: a path would lose the "./" that tells a file from a name.
POLICY_HELP = "what may leave the site: standard, strict, open, or a file."
Policy = Annotated[str | None, typer.Option(metavar="NAME|FILE", help=f"The site's policy, {POLICY_HELP}")]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
RunningState = Annotated[Path, typer.Option("--state", help="State folder of a daemon that runs with --metrics.")]


def log_as_daemon(context: typer.Context) -> None:
    """Switch to the log format of a long-running process; `--debug` of the root command still counts."""
    from protofed.deploy.logs import setup

    setup.configure(debug=bool(context.find_root().params.get("debug")), daemon=True)


def health(state: RunningState, as_json: AsJson = False) -> None:
    """Check that a running daemon is ready. Exit code 0, or 1 and one line that says what is missing.

    Example: `protofed client health --state state`, or `protofed server health --state state`
    """
    from protofed.deploy.daemons import readyz

    raise typer.Exit(readyz.report(state, as_json=as_json))
