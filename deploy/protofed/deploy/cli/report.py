"""`protofed report`: write a run's report as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from protofed.common.address import choose_identity
from protofed.common.errors import ConfigError
from protofed.common.version import install_hint
from protofed.deploy.cli import completion
from protofed.deploy.cli.completion import LOCAL, Identity, Server
from protofed.deploy.cli.options import print_json, say

console = Console()
Run = Annotated[
    str | None,
    typer.Argument(help="The run's name; optional if --state holds only one run.", autocompletion=completion.runs),
]
Out = Annotated[Path | None, typer.Option(help="File to write; default: RUN-report.html in this folder.")]
State = Annotated[
    Path | None,
    typer.Option(help="Read this state folder of a server (it may be running) or of `simulate`; connect to no server."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report's data as JSON instead of writing the report.")]


def report(
    run: Run = None,
    out: Out = None,
    state: State = None,
    server: Server = LOCAL,
    identity: Identity = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's report for readers without access to the server: one self-contained HTML file.

    Example: `protofed report RUN --out report.html`
    """
    if state is not None:
        run_record = read_run_record(state, run)
    elif run is None:
        raise ConfigError("name a run from `protofed runs show`, or a folder with --state")
    else:
        run_record = _fetch(run, server, identity)
    if as_json:
        print_json(run_record)
        return
    path = _write(run_record, out or Path(f"{run_record['run']['name']}-report.html"))
    say(f"{path}: {path.stat().st_size / 1e3:,.0f} kB")


def read_run_record(folder: Path, run: str | None) -> dict[str, Any]:
    """The run record of one run in a state folder.

    Args:
        run: its name; None if the folder holds only one run.

    Raises:
        StateError: the folder is no state folder.
        ConfigError: the folder has no such run, or several and none was named.
    """
    from protofed.deploy.state_folder import open_state
    from protofed.server.operator.run_record import run_record

    with open_state(folder) as folder_state:
        return run_record(folder_state.ledger, folder_state.blobs, folder_state.run(run))


def _fetch(run: str, server: str, identity: str | None) -> dict[str, Any]:
    from protofed.deploy.operator.connection import Operator

    with Operator(server, choose_identity(identity)) as operator, console.status(f"asking {server}"):
        return operator.run_record(run)


def _write(run_record: dict[str, Any], out: Path) -> Path:
    try:
        from protofed.deploy.report.report import write_report
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed, which reports need: {install_hint('report')}") from error
    return write_report(run_record, out)
