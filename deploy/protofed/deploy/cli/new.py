"""`protofed new`: start a package of your own from a template."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

new = typer.Typer(no_args_is_help=True, help="Start a package of your own from a template.")
console = Console()


@new.callback()
def _group() -> None:
    """Keep `method` a subcommand: Typer merges a single command into its group unless the group has a callback."""


@new.command("method")
def method(
    name: Annotated[str, typer.Argument(help="The method's name in recipes, as my-method.")],
    into: Annotated[Path, typer.Option(help="Folder in which to create the package's folder.")] = Path(),
) -> None:
    """Create a package for your own method: client and server halves, recipe, tests, entry point. It starts as FedAvg.

    Example: `protofed new method my-method`
    """
    from protofed.deploy.templates.new_method import new_method

    for path in (files := new_method(name, into)):
        console.print(path, soft_wrap=True, highlight=False)
    root = files[0].parent
    console.print(f"next: pip install -e '{root}\\[test]'", f"then: pytest {root}", sep="\n", soft_wrap=True)
