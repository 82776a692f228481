"""`protofed export`: write a run's model as a folder that other software can read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from safetensors.numpy import save

from protofed.client.data.site_data import SiteData
from protofed.client.policy.rules import LOCAL
from protofed.client.state.own_scores import FOLDER as SCORES_FOLDER
from protofed.client.state.own_scores import OwnScores
from protofed.common import codec, plugins
from protofed.common.clock import utc_now
from protofed.common.config.data import Data
from protofed.common.config.recipe import Recipe
from protofed.common.config.tables import NamedOptions
from protofed.common.config.tasks import build_task
from protofed.common.errors import ConfigError
from protofed.common.payload import Payload, SiteId
from protofed.common.protocol.scores import spreads
from protofed.common.version import VERSION
from protofed.deploy.export import formats, kept_states, model_folder, models
from protofed.deploy.export.kept_states import KeptRound, PublishedState
from protofed.deploy.export.model_card import Choice, card, choice, warnings
from protofed.deploy.export.model_folder import GRAPH, WEIGHTS, File, ModelFacts, ModelScores, Origin, Spec
from protofed.deploy.export.models import BuiltModel
from protofed.deploy.run_view import RunView, from_sum, kept_best

if TYPE_CHECKING:
    from protofed.deploy.operator.connection import Operator

Format = Literal["safetensors", "onnx", "both"]


@dataclass(frozen=True)
class ExportRequest:
    """What to export, from where, and how.

    Attributes:
        kind: global, class:N or personal.
        round: a number, or the best one by the score that judges the run's rounds; None: the newest kept round.
        state: state folder of a server or of a simulation.
        operator: connection to a server, instead of `state`; a personal model never uses one.
        site_state: state folder of a site's daemon; personal models need it.
        site_data: the daemon's [data] and partition index, for methods whose model depends on the site's data.
        recipe: the run's recipe, if neither a state nor the site's folder has it.
        classes: text file with one class name per line.
        allowed: plug-ins that may be imported.
        force: replace a model in `out`.
        dry_run: build and check the model, and write nothing.
    """

    run: str
    kind: str
    out: Path
    format: Format = "both"
    round: int | Literal["best"] | None = None
    state: Path | None = None
    operator: Operator | None = None
    site_state: Path | None = None
    site_data: tuple[Data, int] | None = None
    recipe: Recipe | None = None
    classes: Path | None = None
    allowed: frozenset[str] = frozenset()
    force: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Exported:
    """The written model, or in a dry run the model that would be written.

    Attributes:
        files: size in bytes by file name.
        difference: largest absolute difference of predictions between ONNX Runtime and PyTorch; None without ONNX.
        warnings: signs of a useless model in the run, each with its round.
        choice: why it is the model of this round; empty: the server's record is not at hand.
    """

    folder: Path
    facts: ModelFacts
    files: Mapping[str, int]
    difference: float | None
    warnings: Sequence[tuple[int, str]] = ()
    choice: str = ""


def export(request: ExportRequest) -> Exported:
    """Build the model, check it, and write its folder unless it is a dry run.

    Raises:
        ConfigError: the run has no such model, its weights are not finite, or an option does not fit.
        DataError, StateError: the state is damaged, or its digest is not the ledger's.
        ExportError: a file predicts otherwise than the model.
    """
    plugins.allow(request.allowed)
    model_folder.check_vacant(request.out, force=request.force)
    built, scores, run = _build(request)
    weights = built.model.weights()
    if problem := codec.first_not_finite(weights):
        raise ConfigError(f"the model is unusable: {problem} has values that are not finite; take another --round")
    facts = ModelFacts(model=_spec(request, built), origin=_origin(request, built, weights), scores=scores)
    files: dict[File, bytes] = {}
    difference: float | None = None
    if request.format in ("safetensors", "both"):
        spec, images = facts.model, built.recipe.input
        of_run = images, len(spec.classes), spec.task
        formats.check_weights(built.model, spec.architecture, *of_run, request.allowed)
        flat = {f"{part}.{name}": array for part, tensors in weights.items() for name, array in tensors.items()}
        files[WEIGHTS] = save(flat, facts.strings())
    if request.format in ("onnx", "both"):
        files[GRAPH] = formats.to_onnx(built.model, built.recipe.input, facts.strings())
        difference = formats.difference(built.model, built.recipe.input, formats.run_onnx(files[GRAPH]))
    if not request.dry_run:
        model_folder.write(request.out, facts, files, card(facts, files, difference, run, _chosen(request)))
    sizes: dict[str, int] = {name: len(data) for name, data in files.items()}
    if run is None:
        return Exported(request.out, facts, sizes, difference)
    return Exported(request.out, facts, sizes, difference, warnings(run), choice(run, built.round, _chosen(request)))


def _build(request: ExportRequest) -> tuple[BuiltModel, ModelScores, RunView | None]:
    """The model, its scores, and what is known of its run where the server's record is at hand."""
    kind, number = models.read_kind(request.kind)
    if kind == "personal":
        return *_personal(request), None
    published = _published(request, _number(request))
    if published is None:
        raise ConfigError("expected --state FOLDER or --server, with the run's states")
    _check_recipe(request, published.recipe)
    if number is not None:
        built = models.class_model(published, number, request.allowed)
        return built, ModelScores(of="runs take no scores of a single class's model"), published.run
    return models.global_model(published, request.allowed), _scored(published, _chosen(request)), published.run


def _chosen(request: ExportRequest) -> Choice:
    return request.round if request.round == "best" else "newest" if request.round is None else "given"


def _number(request: ExportRequest) -> int | None:
    """The round to take, by its number; None: the newest."""
    if request.round != "best":
        return request.round
    best = None
    if request.state is not None:
        best = kept_states.best_in(request.state, request.run)
    elif request.operator is not None:
        from protofed.deploy.operator.snapshot_builder import best_snapshot  # which loads gRPC

        best = best_snapshot(request.operator.show(request.run, newest=1))
    return kept_best(request.run, best)


def _personal(request: ExportRequest) -> tuple[BuiltModel, ModelScores]:
    folder = request.site_state
    if folder is None:
        raise ConfigError(
            "a personal model is built from the site's own state folder, on the site's machine: give --site-state"
        )
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; expected the state folder of the site's daemon")
    if request.round == "best":
        raise ConfigError(
            "--round best is known to the server only; expected a number. A site keeps its own models of the newest "
            "rounds. Ask the coordinator for the number of the best round, or leave out --round"
        )
    recipe = _recipe(request, folder)
    kept_round = kept_states.kept(folder, request.run, request.round)
    base, data = partial(_base, request, folder, kept_round), partial(_data, request, recipe, kept_round)
    built = models.personal_model(recipe, kept_round, base, data, request.allowed)
    if request.round not in (None, built.round):
        raise kept_states.no_such_round(folder, request.run, request.round)
    return built, _own_scores(request, folder, kept_round, built.round)


def _base(request: ExportRequest, folder: Path, kept_round: KeptRound) -> kept_states.Base:
    """The model that the server sent to the site: from the server's state, else the newest that the site still has."""
    published = _published(request, _number(request))
    if published is not None:
        return kept_states.Base(published.address, published.round, models.sent_to(published, kept_round.site))
    base = kept_states.newest_base(folder, request.run, kept_round)
    if request.round not in (None, base.round):
        raise ConfigError(
            f"the newest model that the site was sent is of round {base.round}, not {request.round}; leave out "
            "--round, or give the server's state with --state"
        )
    return base


def _published(request: ExportRequest, round: int | None) -> PublishedState | None:
    if request.state is not None:
        return kept_states.of_folder(request.state, request.run, round)
    return None if request.operator is None else kept_states.of_server(request.operator, request.run, round)


def _recipe(request: ExportRequest, folder: Path) -> Recipe:
    if request.state is not None:
        run_recipe = kept_states.recipe_in(request.state, request.run)
        _check_recipe(request, run_recipe)
        return run_recipe
    if request.recipe is not None:
        return request.recipe
    try:
        return kept_states.offered_recipe(folder, request.run)
    except ConfigError as error:
        raise ConfigError(f"{error}; or give the run's --recipe") from error


def _check_recipe(request: ExportRequest, run_recipe: Recipe) -> None:
    recipe = request.recipe
    if (
        recipe is not None
        and recipe.model_copy(update={"name": run_recipe.name}).fingerprint() != run_recipe.fingerprint()
    ):
        raise ConfigError(f"--recipe is not that of run '{run_recipe.name}': they differ; leave it out")


def _data(request: ExportRequest, recipe: Recipe, kept_round: KeptRound) -> SiteData:
    """The site's own data, from its daemon's settings or from a simulation's recipe."""
    from protofed.client.data.site import load_site, load_sites
    from protofed.client.task import build_client_task
    from protofed.deploy.simulation.simulation import site_names

    noisy = recipe.plan.dp is not None
    task = build_client_task(recipe.task)
    if request.site_data is not None:
        return load_site(*request.site_data, recipe.input, recipe.classes, recipe.class_names, noisy=noisy, task=task)
    if request.recipe is not None and request.recipe.data is not None:
        of_run = recipe.input, recipe.classes, recipe.class_names
        sites = load_sites(request.recipe.data, *of_run, noisy=noisy, task=task)
        return dict(zip(site_names(len(sites)), sites, strict=True))[kept_round.site]
    raise ConfigError(
        f"method {recipe.method.name} makes a site's own model by the site's own data: give --settings, those of its "
        "daemon (of a simulation: --recipe with its [data])"
    )


def _own_scores(request: ExportRequest, folder: Path, kept_round: KeptRound, round: int) -> ModelScores:
    """The site's own, as it keeps them."""
    stored = OwnScores(folder / SCORES_FOLDER)
    rounds = stored.rounds(request.run) if request.run in stored.runs() else []
    values = next((scored.scores for scored in rounds if scored.round == round), {})
    personal_scores = {name: value for name, value in values.items() if name.startswith("personal.")}
    return ModelScores(
        of=_of(f"by site {kept_round.site}", round) if personal_scores else f"the site has none of round {round}",
        values=personal_scores,
    )


def _scored(published: PublishedState, chosen: Choice = "newest") -> ModelScores:
    """Scores of the global model, and by whom and on whose images each was taken."""
    over_sites = spreads(published.scores, published.sums)
    of_global = {name: spread for name, spread in over_sites.items() if name.startswith("global.")}
    if not of_global:
        return ModelScores(of=f"none were taken after round {published.round}")
    names = {site: {n for n in scores if n in of_global} for site, scores in published.scores.items()}
    where = _scored_by(names, [spread.sites for spread in of_global.values() if spread.worst is None])
    values = {name: spread.mean for name, spread in of_global.items()}
    if chosen == "best" and published.run is not None and (best := published.run.best) is not None:
        where.append(f"the round was chosen by {best.score}, which makes it optimistic")
    return ModelScores(of=_of("; ".join(where), published.round), values=values)


def _scored_by(names: Mapping[SiteId, Collection[str]], aggregated: Sequence[int]) -> list[str]:
    """Who took the global model's scores, and on whose images.

    Args:
        names: of the scores that each site sent.
        aggregated: for each score from a secure aggregation, how many sites are in it.
    """
    evaluators = sorted(site for site, of_site in names.items() if any(LOCAL not in name for name in of_site))
    local = [site for site, of_site in names.items() if any(LOCAL in name for name in of_site)]
    where = []
    if evaluators:
        middle = {1: "", 2: ", the mean of both"}.get(len(evaluators), ", their median")
        where.append(f"`global.*` on the test images of {' and '.join(evaluators)}{middle}")
    if local:
        where.append(f"`global.local.*` by {len(local)} site(s), each on test images of its own, their mean")
    if aggregated:
        where.append(f"`global.local.*`: {from_sum(max(aggregated))}")
    if not evaluators:
        where.append("no evaluator scored it")
    return where


def _of(where: str, round: int) -> str:
    return f"recorded in the run after round {round}, {where}"


def _spec(request: ExportRequest, built: BuiltModel) -> Spec:
    recipe = built.recipe
    # Without what the run began with: the exported model has its weights.
    architecture = NamedOptions.model_validate({"name": recipe.model.name, **recipe.model.options})
    return Spec(
        architecture=architecture,
        head=built.model.head,
        task=recipe.task,
        predictions=build_task(recipe.task).predictions(),
        input=recipe.input,
        classes=_names(request, recipe),
    )


def _origin(request: ExportRequest, built: BuiltModel, weights: Payload) -> Origin:
    return Origin(
        kind=built.kind,
        site=built.site,
        run=request.run,
        round=built.round,
        method=built.recipe.method,
        recipe=built.recipe.fingerprint(),
        state=built.state,
        weights=codec.digest(codec.encode(weights)),
        protofed=VERSION,
        at=f"{utc_now():%Y-%m-%dT%H:%M:%SZ}",
    )


def _names(request: ExportRequest, recipe: Recipe) -> tuple[str, ...]:
    """Names of the outputs: the given ones, the run's, those of a well-known data set, or numbers."""
    if request.classes is not None:
        return model_folder.read_names(request.classes, recipe.classes)
    from protofed.deploy.plots import class_names  # here: it imports matplotlib

    if recipe.classes == 1 and not recipe.class_names:
        return ("prediction",)
    return tuple(class_names(request.recipe or recipe))
