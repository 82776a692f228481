"""`protofed files`: what comes with protofed for Grafana, Prometheus, systemd, Helm and Compose."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from protofed.common.errors import ConfigError, count
from protofed.deploy.cli.options import AsJson
from protofed.deploy.tables import Column, terminal

console = Console()


def files(
    into: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Folder to write into.")] = None,
    kind: Annotated[list[str] | None, typer.Argument(metavar="[KIND]...", help="Of --list; default: all.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the kinds of files; write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write dashboards, alert rules, systemd units, Helm chart and Compose files into a folder. Overwrites nothing.

    Example: `protofed files monitoring dashboards prometheus`
    """
    from protofed.deploy.shipped_files import KINDS, write_files

    if listed:
        rows = [{"kind": name, "what": one.what} for name, one in KINDS.items()]
        if as_json:
            print(json.dumps(rows, indent=2))  # noqa: T201
        else:
            columns = [Column(key, itemgetter(key), wraps=True) for key in ("kind", "what")]
            console.print(terminal(columns, rows))
        return
    if into is None:
        raise ConfigError("DIR is missing: the folder to write into; --list names the kinds of files")
    written = write_files(into, kind or ())
    if as_json:
        print(json.dumps([str(path) for path in written], indent=2))  # noqa: T201
        return
    for path in written:
        console.print(path, soft_wrap=True, highlight=False)
    console.print(
        f"{count(len(written), 'file')} written" + ("" if written else ": all are there already"), highlight=False
    )
