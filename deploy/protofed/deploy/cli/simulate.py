"""`protofed simulate`, `figures` and `demo`: commands that need no second machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from protofed.common.errors import PolicyViolationError
from protofed.deploy.cli import completion
from protofed.deploy.cli.options import DryRun, DryWrite, Set, needs_recipe, print_json, say, show_dry_run

if TYPE_CHECKING:
    from protofed.common.config.recipe import Recipe
    from protofed.deploy.simulation.simulation import NewPool

console = Console()


def simulate(
    recipe: Annotated[
        str, typer.Argument(help="A recipe's file, or the name of a shipped one.", autocompletion=completion.recipes)
    ],
    state: Annotated[
        Path | None, typer.Option(help="Folder that keeps the simulation; an unfinished one in it continues.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "cpu",
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Policy of all sites, by name (standard) or file; default: sites may send all that the "
            "method sends, and all scores, their own too.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes that train sites at the same time, a thread each; any number gives the same result. "
            "Default: 1, with --ray as many as the cluster has room for.",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Train sites on the Ray cluster at this address; auto: that of RAY_ADDRESS; local: a new one on this "
            "machine."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
    assignments: Set = None,
    dry_run: DryRun = False,
) -> None:
    """Run a recipe on this machine: the same coordinator, agents and methods without a network.

    Example: `protofed simulate digits-fednh`
    """
    from protofed.common.process import quick_imports

    with quick_imports():
        from protofed.common.process import keep_memory
        from protofed.deploy import shipped
        from protofed.deploy.simulation.run_tables import scores_json, simulate_with_progress
        from protofed.deploy.simulation.start_check import check_simulation

    read = shipped.recipe(recipe, assignments or ())
    rules = None if policy is None else shipped.policy(policy)
    if rules is not None:
        check_simulated(read, rules)
    if dry_run:
        check_simulation(read, rules, device)
        show_dry_run([read], simulated=True)
        return
    keep_memory()
    try:
        result = simulate_with_progress(read, state, device, rules, _pool(workers, ray, device), as_json=as_json)
    except KeyboardInterrupt:
        if state is not None:
            typer.echo(f"interrupted; the same command goes on from what is in {state}", err=True)
        raise
    if as_json:
        more: dict[str, object] = {"warnings": [warning.plain() for warning in result.warnings]}
        if result.held_out:
            more["held_out"] = result.held_out
        print_json([one | more for one in scores_json([result.view])])


def check_simulated(recipe: Recipe, policy: Path) -> None:
    """Check that a site with this policy would take part, as far as that is known without its images.

    Raises:
        PolicyViolationError: there is no such policy, or it refuses the run.
        ConfigError: the recipe cannot be used.
    """
    from protofed.client.policy.policy import Policy
    from protofed.deploy.simulation.simulation import simulated
    from protofed.deploy.site.plan import site_plan

    if refusals := site_plan(recipe, simulated(Policy.read(policy))).refusals:
        raise PolicyViolationError(
            f"under policy {policy.stem} no site takes part in {recipe.name}: {'; '.join(refusals)}. `protofed client "
            f"preview` with this recipe and policy says more; `protofed simulate digits-trio --policy standard` is a "
            "run that a policy of hospitals allows"
        )


def figures(
    folders: Annotated[
        list[Path], typer.Argument(help="Jobs of `compare`, its --out folder, or --state folders of `simulate`.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for .png and .svg; default: FOLDER/figures.")] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Recipe of each state folder, in their order: a file, or a shipped name.")
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(help="Groups of classes, as vehicles:0,1,8,9;animals:2,3,4,5,6,7; default: the data's own."),
    ] = None,
    ablation: Annotated[
        str | None,
        typer.Option(help="Draw --metric against the option in which the runs differ, as method.wdr."),
    ] = None,
    metric: Annotated[str, typer.Option(help="A score, as in the columns of `compare`.")] = "global.accuracy",
    assignments: Set = None,
    dry_run: DryWrite = False,
) -> None:
    """Plot finished runs as the papers do: prototypes, embeddings, head norms, groups of classes, ablations.

    Example: `protofed figures runs/compare`
    """
    from protofed.deploy import shipped
    from protofed.deploy.figures.figures import FiguresRequest, draw

    if not recipe:
        needs_recipe(assignments, "--recipe")
    recipes = [shipped.recipe(name, assignments or ()) for name in recipe or []]
    for path in draw(FiguresRequest(folders, out, recipes, groups, ablation, metric, dry_run)):
        say(path)


def demo(
    keep: Annotated[Path, typer.Option(help="Folder for the demo's state, logs and scores.")] = Path("runs/demo"),
) -> None:
    """Run a server, five sites and an evaluator on this machine: FedNH, FedAvg and local training, over gRPC.

    Example: `protofed demo --keep digits-demo`
    """
    from protofed.deploy.cli.demo import run_demo

    run_demo(keep, console)


def _pool(workers: int | None, ray: str | None, device: str) -> NewPool | None:
    """The workers of a simulation: processes of this machine, or actors of a Ray cluster."""
    from protofed.deploy.experiments.ray_node import set_up
    from protofed.deploy.progress import usable_cores
    from protofed.deploy.simulation.worker_processes import choose_workers

    if ray is None:
        return choose_workers(workers or 1)
    set_up(ray, device)
    from protofed.deploy.experiments.ray_workers import RayWorkers

    return partial(RayWorkers, ray, workers, device, usable_cores())
