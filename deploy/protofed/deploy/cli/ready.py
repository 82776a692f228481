"""`protofed ready`: whether the daemon of a state folder can do its work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protofed.deploy.daemons import readyz


def ready(
    state: Annotated[Path, typer.Option(help="The state folder of a daemon on this machine, which has --metrics.")],
) -> None:
    """Ask a running daemon whether it is ready: ends with 0, or with 1 and one line of what it lacks."""
    raise typer.Exit(readyz.tell(state))
