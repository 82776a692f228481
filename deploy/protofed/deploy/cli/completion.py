"""What the shell offers on Tab: recipes, and the runs and sites of the server that the line names.

Nothing here may fail or keep a person waiting: where there is no answer, nothing is offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from protofed.common.errors import ProtofedError
from protofed.deploy.cli.connection import LOCAL

if TYPE_CHECKING:
    from protofed.deploy.operator.connection import Operator

WAIT_S = 1.0  # for a server's answer


def recipes(incomplete: str) -> list[str]:
    """Shipped recipes by name, recipe files and folders by path."""
    from protofed.deploy import shipped

    return _beginning(incomplete, [*shipped.files("recipes"), *_recipe_paths(incomplete)])


def policies(incomplete: str) -> list[str]:
    """Shipped policies by name."""
    from protofed.deploy import shipped

    return _beginning(incomplete, shipped.files("policies"))


def runs(context: typer.Context, incomplete: str) -> list[str]:
    """The server's runs, the newest first."""
    return _beginning(incomplete, reversed(_asked(context, lambda operator: [r.run for r in operator.runs(WAIT_S)])))


def sites(context: typer.Context, incomplete: str) -> list[str]:
    """The server's sites."""
    return _beginning(incomplete, _asked(context, lambda operator: [s.site for s in operator.sites(WAIT_S)]))


def _recipe_paths(incomplete: str) -> list[str]:
    typed = Path(incomplete)
    folder = typed if incomplete.endswith("/") else typed.parent
    try:
        entries = [(path, path.is_dir()) for path in sorted(folder.iterdir())]
    except OSError:
        return []
    return [
        f"{path}/" if is_folder else str(path)
        for path, is_folder in entries
        if (is_folder or path.suffix == ".toml") and (typed.name.startswith(".") or not path.name.startswith("."))
    ]


def _asked(context: typer.Context, question: Callable[[Operator], list[str]]) -> list[str]:
    from protofed.deploy.operator.connection import Operator

    given = context.params
    try:
        with Operator(given.get("server") or LOCAL, given.get("identity"), bool(given.get("plaintext"))) as operator:
            return question(operator)
    except (ProtofedError, OSError):
        return []


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
