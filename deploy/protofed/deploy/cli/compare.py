"""`protofed compare`: simulate every recipe with every seed and compare the scores."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from protofed.deploy.cli import completion
from protofed.deploy.cli.options import SELDOM, DryRun, Set, show_dry_run

Ray = Annotated[
    str | None,
    typer.Option(
        help="Run on the Ray cluster at this address; auto: that of RAY_ADDRESS; local: a new one on this machine.",
        rich_help_panel=SELDOM,
    ),
]
GpusPerJob = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="With --ray: GPUs per job, 0.5 for two jobs on each GPU; default: 1 with --device cuda.",
        rich_help_panel=SELDOM,
    ),
]


def compare(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, or names of shipped recipes; none: print the results in --out again.",
            autocompletion=completion.recipes,
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds of runs and data, as 0,1,2; default: the recipes' own.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for tables, curves, page and all runs; unfinished work in it continues.")
    ] = Path("runs/compare"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs in parallel; default: one for --workers cores.")] = None,
    workers: Annotated[
        int,
        typer.Option(
            min=1, help="Processes for the sites of each run, as in `simulate`, if there are fewer runs than cores."
        ),
    ] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "cpu",
    output: Annotated[
        str | None, typer.Option("--format", help="Format of the printed table: md, csv or json.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this column: a score, as personal.pm_v, or with :std, :worst, :active, :recent, :held-out. "
            "May be repeated."
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Shorten every recipe to this many rounds.")] = None,
    vary: Annotated[
        str | None,
        typer.Option(help="Run every recipe with each of these values, as method.prototype_momentum=0.1,0.5,0.9."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Recipe that the others are compared with, seed by seed; default: the first.")
    ] = None,
    reach: Annotated[
        str | None,
        typer.Option(help="Add the rounds, bytes and local epochs that reach a score, as global.accuracy=0.8."),
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            help="First choose one of these values for each recipe, on a validation part of the training images, as "
            "plan.lr=0.01,0.1. Several make a grid."
        ),
    ] = None,
    tune_by: Annotated[
        str | None,
        typer.Option(
            help="Score that chooses, as personal.pm_v; of several with commas, the first that a recipe's runs have. "
            "Default: the first that all have of balanced accuracy of the global model, its accuracy, and own models'.",
            rich_help_panel=SELDOM,
        ),
    ] = None,
    tune_seeds: Annotated[
        str | None, typer.Option(help="Seeds of the runs that choose; default: --seeds.", rich_help_panel=SELDOM)
    ] = None,
    keep_old: Annotated[
        bool,
        typer.Option(
            "--keep-old",
            help="Keep finished runs that other code than the installed one computed.",
            rich_help_panel=SELDOM,
        ),
    ] = False,
    ray: Ray = None,
    gpus_per_job: GpusPerJob = None,
    assignments: Set = None,
    dry_run: DryRun = False,
) -> None:
    """Simulate recipes with several seeds and compare their scores in one table.

    Example: `protofed compare digits-fednh digits-fedavg --seeds 0,1,2`
    """
    from protofed.deploy.experiments import experiment, tuning
    from protofed.deploy.experiments.compare import CompareRequest, compare, read_seeds
    from protofed.deploy.report.comparison import page
    from protofed.deploy.shipped import recipe
    from protofed.deploy.simulation.start_check import check_simulation

    read = [recipe(name, assignments or ()) for name in recipes or []]
    request = CompareRequest(
        out,
        seeds=read_seeds(seeds),
        rounds=rounds,
        at_once=jobs,
        device=device,
        format=output,
        metrics=metric or (),
        ray=ray,
        gpus_per_job=gpus_per_job,
        workers=workers,
        keep_old=keep_old,
        against=against,
        reach=reach,
        grid=tuning.read_grid(tune or ()),
        tune_by=tuning.read_scores(tune_by),
        tune_seeds=read_seeds(tune_seeds),
        command=command_line(
            list(recipes or ()),
            {
                "seeds": seeds,
                "rounds": rounds,
                "vary": vary,
                "tune": tune,
                "tune-by": tune_by,
                "tune-seeds": tune_seeds,
                "set": assignments,
                "device": None if device == "cpu" else device,
            },
        ),
    )
    chosen = experiment.varied(read, vary) if vary else read
    if dry_run:
        search_args = chosen, request.grid, request.tune_by, request.tuned_on, rounds, out
        planned_jobs = (
            tuning.search(*search_args)[1] if tune else experiment.plan_jobs(chosen, request.seeds, rounds, out)
        )
        for job in planned_jobs:
            check_simulation(job.recipe, device=device)
        show_dry_run([job.recipe for job in planned_jobs], simulated=True)
        return
    compare(chosen, request, page)


def command_line(recipes: Sequence[str], options: Mapping[str, object]) -> str:
    """What computes the same again, for others: without the folders of this machine.

    Args:
        options: by name; those that are None were not given.
    """
    from protofed.deploy.report.comparison import without_folder

    words = ["protofed", "compare", *(Path(name).name for name in recipes)]
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                key, equals, text = str(one).partition("=")
                words += [f"--{name}", shlex.quote(f"{key}{equals}{without_folder(key, text)}")]
    return " ".join(words)
