"""`protofed simulate`, `figures` and `demo`: what needs no second machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from protofed.deploy.cli.overrides import DryRun, DryWrite, Set, needs_recipe, show_dry_run

console = Console()


def simulate(
    recipe: Annotated[str, typer.Argument(help="A recipe's file, or the name of one that comes with protofed.")],
    state: Annotated[
        Path | None, typer.Option(help="Folder in which the simulation survives; an unfinished one in it goes on.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "cpu",
    policy: Annotated[Path | None, typer.Option(help="Of the sites; else all that the method sends leaves.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
    assignments: Set = None,
    dry_run: DryRun = False,
) -> None:
    """Run a recipe in one process: the same coordinator, agents and methods without the network."""
    from protofed.common.malloc import keep_memory
    from protofed.deploy import shipped
    from protofed.deploy.simulation.run_tables import scores_json, simulate_with_progress

    read = shipped.recipe(recipe, assignments or ())
    if dry_run:
        show_dry_run([read], simulated=True)
        return
    keep_memory()
    view = simulate_with_progress(read, state, device, policy)
    if as_json:
        print(json.dumps(scores_json([view]), indent=2))  # noqa: T201


def figures(
    folders: Annotated[
        list[Path], typer.Argument(help="Jobs of `compare`, its whole --out, or --state folders of `simulate`.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for .png and .svg; else FOLDER/figures.")] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Of each FOLDER that is a state, in their order: a file, or a name.")
    ] = None,
    groups: Annotated[
        str | None, typer.Option(help="Of classes, such as vehicles:0,1,8,9;animals:2,3,4,5,6,7; else the data's own.")
    ] = None,
    ablation: Annotated[
        str | None, typer.Option(help="Draw --metric over this option instead, in which the runs differ: method.wdr.")
    ] = None,
    metric: Annotated[str, typer.Option(help="A score, as `compare` has it.")] = "global.accuracy",
    assignments: Set = None,
    dry_run: DryWrite = False,
) -> None:
    """Draw finished runs as the papers do: prototypes, embeddings, head norms, groups of classes, ablations."""
    from protofed.deploy import shipped
    from protofed.deploy.figures.figures import FiguresRequest, draw

    if not recipe:
        needs_recipe(assignments, "--recipe")
    recipes = [shipped.recipe(name, assignments or ()) for name in recipe or []]
    for path in draw(FiguresRequest(folders, out, recipes, groups, ablation, metric, dry_run)):
        console.print(path, soft_wrap=True, highlight=False)


def demo(
    keep: Annotated[Path, typer.Option(help="Folder for the demo's state, logs and scores.")] = Path("runs/demo"),
) -> None:
    """A server and five sites on this machine: FedNH beside FedAvg and training alone, over gRPC."""
    from protofed.deploy.cli.demo import run_demo

    run_demo(keep, console)
