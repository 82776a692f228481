"""`--set` and `--dry-run`: what every command that reads a recipe shares."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from protofed.common.config.recipe import Recipe

Set = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE in TOML over what the recipe says, as plan.lr=0.1; again.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check the recipe, print what would run, and start nothing.")]


def show_dry_run(recipes: Sequence[Recipe]) -> None:
    """Print each recipe in full as TOML, a key a line, after the method and the model were built from it.

    Raises:
        ConfigError: a method, model or option that is not known, or a recipe without [data].
    """
    from protofed.deploy.experiments.experiment import leaves
    from protofed.deploy.simulation.simulation import check_recipe

    for recipe in recipes:
        parameters = check_recipe(recipe)
        typer.echo(f"# {recipe.rounds} rounds of {recipe.method.name}; {recipe.model.name}: {parameters} parameters")
        for key, value in leaves(recipe.model_dump(mode="json", exclude_none=True)):
            typer.echo(f"{key} = {json.dumps(value, ensure_ascii=False)}")
