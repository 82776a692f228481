"""`protofed figures`: what the papers draw of their methods, drawn of one's own finished runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from matplotlib.figure import Figure

from protofed.client.method import client_methods
from protofed.client.tasks.classification import group_classes
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import Part
from protofed.deploy.experiments.experiment import ExperimentJob, Result, read_contents
from protofed.deploy.experiments.summary import named, summarise
from protofed.deploy.figures.finished_run import FinishedRun, embedded, open_run
from protofed.deploy.figures.matrices import draw_prototypes, draw_shares, read_groups, read_shares
from protofed.deploy.figures.plane import (
    MAX_EXAMPLES,
    by_angle,
    by_neighbours,
    draw_angles,
    draw_tsne,
    inputs_plane,
    name_classes,
)
from protofed.deploy.plots import COLOURS, framed, percent, save, titled
from protofed.deploy.progress import progress
from protofed.deploy.shipped import leaves
from protofed.server.method import ClasswiseMethod, server_methods

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
        ConfigError: the runs have nothing to draw, or an option that cannot be used.
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
            yield f"norms-{run.label}", draw_shares(read_shares(run), run.title)


def _of_features(runs: Sequence[FinishedRun]) -> Iterator[tuple[str, Figure]]:
    """Runs with a global model and a test set side by side, by how many dimensions their embeddings have."""
    embeddings = [(run, embedded(run, MAX_EXAMPLES)) for run in runs if run.server_half.global_model]
    flat = [(run, test) for run, test in embeddings if test.features.shape[1] == 2]
    deep = [(run, test) for run, test in embeddings if test.features.shape[1] > 2]
    if flat:
        yield "directions", draw_angles(inputs_plane(flat[0][1]), [by_angle(run, test) for run, test in flat])
    if deep:
        yield "tsne", draw_tsne([by_neighbours(run, test) for run, test in deep], name_classes(deep[0][0]))


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


_FREE = {"name", "seed", "data.seed"}  # in which the runs of an ablation may differ besides


@dataclass(frozen=True)
class Ablation:
    """A score over the values of one option.

    Attributes:
        option: as in a recipe, `method.prototype_momentum`.
        metric: as `protofed compare --metric` has it.
        values: the option's, ascending.
        scores: for each value, those of its seeds.
        percent: whether people are shown scores times 100.
    """

    option: str
    metric: str
    values: Sequence[float]
    scores: Sequence[Sequence[float]]
    percent: bool


def group_recalls(scores: Mapping[str, float], classes: int, order: tuple[int, ...] = ()) -> dict[str, float]:
    """Mean recall of the global model over the classes of each of FedPRP's groups, and over all classes.

    On a balanced test set that is the accuracy on the group. Groups without a class are left out, and where a class
    has no recall, everything.
    """
    recalls = {c: scores[name] for c in range(classes) if (name := f"global.recall.{c}") in scores}
    if len(recalls) < classes:
        return {}
    groups = {**group_classes(classes, order), "all": list(range(classes))}
    return {name: float(np.mean([recalls[c] for c in members])) for name, members in groups.items() if members}


def ablation(results: Sequence[Result], option: str, metric: str) -> Ablation:
    """What the runs give by the option's value.

    Raises:
        ConfigError: no runs, an option that is no number of the recipes, recipes that differ in anything else but
            name and seeds, only one value, or no such metric.
    """
    if not results:
        raise ConfigError(
            "none of the folders holds a finished job; run `compare` over recipes that differ in one number"
        )
    rests = [{k: v for k, v in leaves(_plain(r.recipe)) if k not in {*_FREE, option}} for r in results]
    for settings, result in zip(rests, results, strict=True):
        if odd := sorted(k for k in settings.keys() | rests[0].keys() if settings.get(k) != rests[0].get(k)):
            raise ConfigError(
                f"'{result.recipe.name}' and '{results[0].recipe.name}' differ in {odd[0]}, too; "
                f"expected recipes that are equal but for {option} and seeds"
            )
    summaries = [summarise(result) for result in results]
    column = named(metric, summaries)
    by_value: dict[float, list[float]] = {}
    for result, of_run in zip(results, summaries, strict=True):
        if (score := column.read(of_run)) is not None:
            by_value.setdefault(read_option(result.recipe, option), []).append(score)
    if len(by_value) < 2:
        raise ConfigError(
            f"the runs have {option} = {', '.join(map(str, by_value)) or 'none'}; expected several values"
        )
    return Ablation(option, metric, sorted(by_value), [by_value[value] for value in sorted(by_value)], column.percent)


def read_option(recipe: Recipe, option: str) -> float:
    """A number of the recipe, or of its method's defaults.

    Raises:
        ConfigError: there is no such option, or it is no number.
    """
    value = dict(leaves(_plain(recipe))).get(option)
    table, _, name = option.partition(".")
    if value is None and table == "method":
        halves = (of.build(recipe.method.name, recipe.method.options) for of in (client_methods, server_methods))
        value = next((getattr(half, name) for half in halves if hasattr(half, name)), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f"recipe '{recipe.name}' has {option} = {value}; expected the name of a number, "
            "such as method.prototype_momentum"
        )
    return float(value)


def draw_groups(groups: Mapping[str, Mapping[str, float]]) -> Figure:
    """A group of bars for each group of classes, a bar for each run."""
    names = list(next(iter(groups.values())))
    figure = titled(3.2, "Global model: recall on frequent and on rare classes")
    axes = figure.subplots()
    width = 0.82 / len(groups)
    for place, (label, recalls) in enumerate(groups.items()):
        at = np.arange(len(names)) + (place - (len(groups) - 1) / 2) * width
        bars = axes.bar(at, percent([recalls[n] for n in names]), width * 0.94, label=label, color=_colour(place))
        if len(groups) <= 4:
            axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, 108)
    axes.set_yticks(range(0, 101, 20))
    framed(axes)
    figure.legend(loc="outside lower left", ncols=min(len(groups), 3), fontsize=8, frameon=False)
    return figure


def draw_ablation(result: Ablation) -> Figure:
    """The mean over seeds at each value, all at the same distance, with the seeds as dots."""
    figure = titled(3.2, f"{result.metric} over {result.option}")
    axes = figure.subplots()
    scale = 100 if result.percent else 1
    means = [scale * float(np.mean(seeds)) for seeds in result.scores]
    for place, seeds in enumerate(result.scores):
        if len(seeds) > 1:
            axes.plot([place] * len(seeds), scale * np.asarray(seeds), "o", color=COLOURS[0], alpha=0.35, markersize=4)
    axes.plot(range(len(means)), means, "o-", color=COLOURS[0], linewidth=1.8)
    form = "{:.1f}" if result.percent else "{:.3f}"
    for place, mean in enumerate(means):
        axes.annotate(form.format(mean), (place, mean), (7, -11), textcoords="offset points", fontsize=8)
    axes.set_xticks(range(len(means)), [f"{value:g}" for value in result.values])
    axes.set_xlabel(result.option)
    axes.margins(x=0.06, y=0.18)
    framed(axes)
    if not result.percent:
        axes.set_ylabel("")
    if (most := max(map(len, result.scores))) > 1:
        figure.supxlabel(f"line: mean over up to {most} seeds, pale dots: seeds", fontsize=8, color="0.4")
    return figure


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _plain(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json")
