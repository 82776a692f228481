"""`protofed report`: a run as one HTML file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from protofed.common.errors import ConfigError
from protofed.deploy.cli.connection import LOCAL, Identity, Plaintext, Server

console = Console()
Run = Annotated[str | None, typer.Argument(help="The run's name; may be left out where --state holds only one.")]
Out = Annotated[Path | None, typer.Option(help="The file; else RUN-report.html here.")]
State = Annotated[
    Path | None,
    typer.Option(help="Read this state folder of a server (it may run) or of `simulate`, and ask no server."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print all that the report is made of as JSON, and write none.")]


def report(
    run: Run = None,
    out: Out = None,
    state: State = None,
    server: Server = LOCAL,
    identity: Identity = None,
    plaintext: Plaintext = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's report: one HTML file with everything in it, to be shown to people who were not there."""
    if state is not None:
        found = run_record_of(state, run)
    elif run is None:
        raise ConfigError("name the run, as `protofed runs list` has it, or a folder with --state")
    else:
        found = _asked(run, server, identity, plaintext)
    if as_json:
        print(json.dumps(found, indent=2))  # noqa: T201
        return
    where = _write(found, out or Path(f"{found['run']['name']}-report.html"))
    console.print(f"{where}: {where.stat().st_size / 1e3:,.0f} kB", soft_wrap=True, highlight=False, markup=False)


def run_record_of(folder: Path, run: str | None) -> dict[str, Any]:
    """From a state folder.

    Raises:
        StateError: it is none.
        ConfigError: it holds no such run, or several and none was named.
    """
    from protofed.deploy.state_folder import open_state
    from protofed.server.operator.run_record import run_record

    with open_state(folder) as kept:
        return run_record(kept.ledger, kept.blobs, kept.run(run))


def _asked(run: str, server: str, identity: Path | None, plaintext: bool) -> dict[str, Any]:
    from protofed.deploy.operator.connection import Operator

    with Operator(server, identity, plaintext) as operator, console.status(f"asking {server}"):
        return operator.run_record(run)


def _write(run_record: dict[str, Any], out: Path) -> Path:
    try:
        from protofed.deploy.report.report import write_report
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: reports need pip install 'protofed[report]'") from error
    return write_report(run_record, out)
