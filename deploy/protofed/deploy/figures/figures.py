"""`protofed figures`: what the papers draw of their methods, drawn of one's own finished runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

import structlog
from matplotlib.figure import Figure

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import Part
from protofed.deploy.console.progress import progress
from protofed.deploy.experiments.contents import read_contents
from protofed.deploy.experiments.experiment import ExperimentJob
from protofed.deploy.figures.finished_run import FinishedRun, embedded, open_run
from protofed.deploy.figures.matrices import draw_prototypes, draw_shares, read_groups, shares_of
from protofed.deploy.figures.plane import MOST, by_angle, by_neighbours, draw_angles, draw_tsne, inputs_plane, names_of
from protofed.deploy.figures.scores import ablation, draw_ablation, draw_groups, group_recalls
from protofed.deploy.plots.style import save
from protofed.server.method import ClasswiseMethod

log = structlog.get_logger()


@dataclass(frozen=True)
class FiguresRequest:
    """What the command line asks for.

    Attributes:
        folders: jobs, comparisons (all of their jobs), or states of simulations; the first one's classes are grouped.
        recipes: of the folders that are a simulation's state, in their order.
        groups: of classes, as `read_groups` reads them.
        dry_run: draw, and write nothing.
        ablation: the option over which a metric is drawn; None: the methods' own pictures.
    """

    folders: Sequence[Path]
    out: Path | None = None
    recipes: Sequence[Recipe] = ()
    groups: str | None = None
    ablation: str | None = None
    metric: str = "global.accuracy"
    dry_run: bool = False


def draw(request: FiguresRequest) -> list[Path]:
    """Draw them; the paths that were written, or would be.

    Raises:
        StateError: a folder holds no finished run.
        ConfigError: there is nothing to be drawn of these runs, or an option that cannot be used.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    out = request.out or request.folders[0] / "figures"
    folders = list(chain.from_iterable(map(_jobs, request.folders)))
    if request.ablation is not None:
        results = [result for folder in folders if (result := ExperimentJob.claimed(folder).result()) is not None]
        values = ablation(results, request.ablation, request.metric)
        name = f"{request.ablation}-{request.metric}".replace(".", "-").replace(":", "-")
        return save(draw_ablation(values), out, name, dry_run=request.dry_run)
    recipes = chain(request.recipes, repeat(None))
    runs = [open_run(folder, None if (folder / "recipe.json").exists() else next(recipes)) for folder in folders]
    with progress("drawing") as bar:
        drawn = []
        for name, figure in chain(_of_each_run(runs, request.groups), _of_features(runs), _of_groups(runs)):
            bar.say(f"{name} is done")
            drawn.append((name, figure))
    if not drawn:
        methods = ", ".join(sorted({run.recipe.method.name for run in runs}))
        raise ConfigError(f"there are no pictures of {methods}; expected one with a global model, or with class shares")
    return [path for name, figure in drawn for path in save(figure, out, name, dry_run=request.dry_run)]


def _of_each_run(runs: Sequence[FinishedRun], groups: str | None) -> Iterator[tuple[str, Figure]]:
    """Pictures of a single run, for methods that have one."""
    for run in runs:
        if "mean" in run.state.get(Part.PROTOTYPES, {}):  # prototypes of all classes, from before the first round on
            source = run.recipe.data.source if run.recipe.data else ""
            grouped = read_groups(groups, source, len(run.state[Part.PROTOTYPES]["mean"]))
            yield f"prototypes-{run.label}", draw_prototypes(run, grouped)
        if Part.CLASS_SHARES in run.state and isinstance(run.server_half, ClasswiseMethod):
            yield f"norms-{run.label}", draw_shares(shares_of(run), run.title)


def _of_features(runs: Sequence[FinishedRun]) -> Iterator[tuple[str, Figure]]:
    """Runs with a global model and a test set side by side, by how many dimensions their embeddings have."""
    embeddings = [(run, embedded(run, MOST)) for run in runs if run.server_half.global_model]
    flat = [(run, test) for run, test in embeddings if test.features.shape[1] == 2]
    deep = [(run, test) for run, test in embeddings if test.features.shape[1] > 2]
    if flat:
        yield "directions", draw_angles(inputs_plane(flat[0][1]), [by_angle(run, test) for run, test in flat])
    if deep:
        yield "tsne", draw_tsne([by_neighbours(run, test) for run, test in deep], names_of(deep[0][0]))


def _of_groups(runs: Sequence[FinishedRun]) -> Iterator[tuple[str, Figure]]:
    by_run = {
        run.label: recalls
        for run in runs
        if (recalls := group_recalls(run.scores, run.recipe.classes, run.recipe.evaluation.class_order))
    }
    sizes = {len(recalls) for recalls in by_run.values()}
    if len(sizes) == 1:
        yield "groups", draw_groups(by_run)
    elif sizes:
        log.warning("no picture of groups: the runs have different numbers of them", runs=sorted(by_run))


def _jobs(folder: Path) -> list[Path]:
    """A comparison's jobs; any other folder itself."""
    return [folder / name for name in read_contents(folder).jobs] if (folder / "comparison.json").exists() else [folder]
