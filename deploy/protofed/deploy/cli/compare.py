"""`protofed compare`: recipes times seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protofed.deploy.cli.overrides import DryRun, Set, show_dry_run


def compare(
    recipes: Annotated[
        list[str] | None, typer.Argument(help="Files, or names of those that come along; none: print --out's again.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Such as 0,1,2: of runs and data; else the recipes' own.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for tables, curves and all runs; an unfinished one goes on.")
    ] = Path("runs/compare"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs side by side; else one a core.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "cpu",
    output: Annotated[str | None, typer.Option("--format", help="Print md, csv or json.")] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="Only these columns: a score, as personal.pm_v, or one with :std, :worst, :active, :recent."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Shorten every recipe to this many.")] = None,
    vary: Annotated[
        str | None, typer.Option(help="Every recipe once for each value, as in method.prototype_momentum=0.1,0.5,0.9.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(help="Run them on the Ray cluster at this address; auto: RAY_ADDRESS's; local: one of this call."),
    ] = None,
    gpus_per_job: Annotated[
        float | None, typer.Option(min=0, help="With --ray, and 0.5 for two jobs a GPU; else 1 for --device cuda.")
    ] = None,
    assignments: Set = None,
    dry_run: DryRun = False,
) -> None:
    """Simulate recipes side by side and compare what they give, over seeds."""
    from protofed.deploy.experiments import experiment
    from protofed.deploy.experiments.compare import CompareRequest, compare, read_seeds
    from protofed.deploy.shipped import recipe

    read = [recipe(name, assignments or ()) for name in recipes or []]
    wanted = CompareRequest(out, read_seeds(seeds), rounds, jobs, device, output, metric or (), ray, gpus_per_job)
    chosen = experiment.varied(read, vary) if vary else read
    if dry_run:
        show_dry_run([job.recipe for job in experiment.jobs_of(chosen, wanted.seeds, rounds, out)], simulated=True)
        return
    compare(chosen, wanted)
