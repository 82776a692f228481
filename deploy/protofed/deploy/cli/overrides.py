"""`--set` and `--dry-run`, for every command that reads a recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from protofed.common.errors import ConfigError

if TYPE_CHECKING:
    from protofed.common.config.recipe import Recipe

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="KEY=VALUE in TOML, as plan.lr=0.1: replace a key of the recipe; KEY= removes it. May be repeated.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Check and print the recipe, its sites and what they send; start and write nothing."
    ),
]
DryWrite = Annotated[
    bool, typer.Option("--dry-run", help="Do all the work, print what would be written, and write nothing.")
]


def show_dry_run(recipes: Sequence[Recipe], *, simulated: bool) -> None:
    """Print each recipe as TOML, one key per line, with comments on its sites and on what leaves a site.

    Args:
        simulated: the sites are those of the recipe's [data]; else daemons, which have data of their own.

    Raises:
        ConfigError: an unknown method, model or option, or a recipe without [data] that would be simulated.
    """
    from protofed.deploy.overrides import leaves
    from protofed.deploy.site.recipe_privacy import planned_lines

    for recipe in recipes:
        if simulated and recipe.data is None:
            raise ConfigError(f"recipe '{recipe.name}' has no [data]; a simulation needs to know what its sites hold")
        about = (_title(recipe), _sites(recipe, simulated=simulated), *_outgoing(recipe), *planned_lines(recipe))
        for line in about:
            typer.echo(f"# {line}")
        for key, value in leaves(recipe.model_dump(mode="json", exclude_none=True)):
            typer.echo(f"{key} = {json.dumps(value, ensure_ascii=False)}")


def needs_recipe(assignments: Sequence[str] | None, option: str) -> None:
    """Refuse `--set` when no recipe was given. Called by commands whose recipe is optional.

    Args:
        option: what to add, as named in the error.

    Raises:
        ConfigError: there are assignments.
    """
    if assignments:
        raise ConfigError(f"--set changes a recipe, and none was given; add {option}")


def _title(recipe: Recipe) -> str:
    return f"{recipe.name}: {recipe.rounds} rounds of {recipe.method.name}, model {recipe.model.name}"


def _sites(recipe: Recipe, *, simulated: bool) -> str:
    federation = recipe.federation
    if simulated and recipe.data is not None:
        partition = recipe.data.partition
        sites = getattr(partition, "sites", None)
        count = f"{sites} and an evaluator" if sites else "as the data define them, and an evaluator"
        held_out = f", the last {apart} held out" if (apart := recipe.data.held_out_sites) else ""
        return f"sites: {count}, of {recipe.data.source} data, partition {partition.kind}{held_out}"
    required = f", {', '.join(federation.required_sites)} among them" if federation.required_sites else ""
    return f"sites: all that take part; a round opens with at least {federation.min_sites} trainers{required}"


def _outgoing(recipe: Recipe) -> Iterator[str]:
    """What leaves a site that has all classes and a policy that allows everything.

    Without PyTorch, as on a server, one line says that this was not checked.
    """
    try:
        from protofed.deploy.simulation.simulation import everything
        from protofed.deploy.site.plan import site_plan
    except ModuleNotFoundError as error:
        yield f"not checked: method and model, and what leaves a site; {error.name} is not installed here"
        return
    plan = site_plan(recipe, everything(recipe))
    parts = ", ".join(dict.fromkeys(tensor.spec.part.value for tensor in plan.outgoing)) or "no tensors"
    count = " and the number of examples" if plan.count_needed else ""
    size = f"{plan.sent_bytes[1]:,} bytes"
    masked = f"as one masked vector, {size}" if plan.masked is not None else f"at most {size}"
    yield f"leaves a site each round: {parts}{count}; {masked}"
    for how, scores in (("as numbers", plan.released), ("in a secure sum alone", plan.summed)):
        for of, names in scores.items():
            if names:
                yield f"leaves a site {how}, {of}: {', '.join(names)}"
    yield "a site's policy can withhold any of it: `protofed client preview RECIPE --policy standard`"
