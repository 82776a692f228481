"""Asks before a command does what cannot be taken back."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from protofed.common.errors import ConfigError

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def confirm(question: str) -> None:
    """Return only if the person at the terminal agrees.

    Raises:
        ConfigError: there is nobody to ask.
        typer.Abort: the person declined.
    """
    if not sys.stdin.isatty():
        raise ConfigError(f"no terminal to ask on: “{question}”; give --yes if that is what you want")
    typer.confirm(question, abort=True, err=True)
