"""`protofed new`: begin something of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

new = typer.Typer(no_args_is_help=True, help="Write the beginning of a package of your own.")
console = Console()


@new.callback()
def _group() -> None:
    """Keep `method` a command of its own, though there is no other one yet."""


@new.command("method")
def method(
    name: Annotated[str, typer.Argument(help="Of the method, as recipes name it: my-method.")],
    into: Annotated[Path, typer.Option(help="Folder in which the package's folder is made.")] = Path(),
) -> None:
    """Write a package with a method of your own: both halves, a recipe, tests and the entry point; FedAvg at first."""
    from protofed.deploy.templates.new_method import new_method

    for path in (files := new_method(name, into)):
        console.print(path, soft_wrap=True, highlight=False)
    root = files[0].parent
    console.print(f"next: pip install -e '{root}\\[test]'", f"then: pytest {root}", sep="\n", soft_wrap=True)
