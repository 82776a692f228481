"""`protofed export`: a run's model as a folder that other software can use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from safetensors.numpy import save

from protofed.client.data.site_data import SiteData
from protofed.common import codec, plugins
from protofed.common.clock import utc_now
from protofed.common.config.recipe import Data, Recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import Payload
from protofed.common.statistics import spreads
from protofed.common.version import VERSION
from protofed.deploy.export import model_folder, onnx, published_states
from protofed.deploy.export import models as models
from protofed.deploy.export import site_state as export_site
from protofed.deploy.export.model_card import card
from protofed.deploy.export.model_folder import GRAPH, WEIGHTS, File, ModelFacts, ModelScores, Origin, Spec
from protofed.deploy.export.models import BuiltModel
from protofed.deploy.export.published_states import PublishedState
from protofed.deploy.export.site_state import KeptRound

if TYPE_CHECKING:
    from protofed.deploy.operator.connection import Operator

Format = Literal["safetensors", "onnx", "both"]


@dataclass(frozen=True)
class ExportRequest:
    """What to export, from where, and how.

    Attributes:
        kind: global, class:N or personal.
        round: None: the newest.
        state: folder of a server or of a simulation.
        operator: of a server, in place of it; a personal model is never made with one.
        site_state: folder of a site; with it personal models are made.
        site_data: of the site's daemon, and its share, where its own data say what it predicts with.
        recipe: of the run, where neither a state nor the site's folder has it.
        classes: file with a name a line.
        allowed: plug-ins that may be imported.
        dry_run: make and check the model, and write nothing.
    """

    run: str
    kind: str
    out: Path
    format: Format = "both"
    round: int | None = None
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
    """What was written, or would be; `difference` is that of ONNX Runtime and PyTorch, None without ONNX."""

    folder: Path
    facts: ModelFacts
    files: Mapping[str, int]
    difference: float | None


def export(wanted: ExportRequest) -> Exported:
    """Make the model, check it, and write its folder, unless it is a dry run.

    Raises:
        ConfigError: there is no such model, or an option does not fit.
        DataError, StateError: what it is made of is damaged, or is not what the ledger says.
        ExportError: ONNX Runtime does not answer as PyTorch does.
    """
    plugins.allow(wanted.allowed)
    model_folder.check_vacant(wanted.out, force=wanted.force)
    made, scores = _made(wanted)
    weights = made.model.weights()
    if bad := codec.first_not_finite(weights):
        raise ConfigError(f"the model is unusable: {bad} has values that are not finite; take another --round")
    facts = ModelFacts(model=_spec(wanted, made), origin=_origin(wanted, made, weights), scores=scores)
    files: dict[File, bytes] = {}
    difference: float | None = None
    if wanted.format in ("safetensors", "both"):
        flat = {f"{part}.{name}": array for part, tensors in weights.items() for name, array in tensors.items()}
        files[WEIGHTS] = save(flat, facts.strings())
    if wanted.format in ("onnx", "both"):
        files[GRAPH] = onnx.to_onnx(made.model, made.recipe.input, facts.strings())
        difference = onnx.difference(made.model, made.recipe.input, files[GRAPH])
    if not wanted.dry_run:
        model_folder.write(wanted.out, facts, files, card(facts, files, difference))
    return Exported(wanted.out, facts, {name: len(data) for name, data in files.items()}, difference)


def _made(wanted: ExportRequest) -> tuple[BuiltModel, ModelScores]:
    kind, number = models.read_kind(wanted.kind)
    if kind == "personal":
        return _personal(wanted)
    found = _published(wanted, wanted.round)
    if found is None:
        raise ConfigError("expected --state FOLDER or --server, with the run's states")
    _check_recipe(wanted, found.recipe)
    if number is not None:
        made = models.class_model(found, number, wanted.allowed)
        return made, ModelScores(of="runs take no scores of a single class's model")
    return models.global_model(found, wanted.allowed), _scored(found, "global.", "on the test set of the evaluators")


def _personal(wanted: ExportRequest) -> tuple[BuiltModel, ModelScores]:
    folder = wanted.site_state
    if folder is None:
        raise ConfigError("a personal model is made of the site's own state folder, on the site: give --site-state")
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; expected the state folder of the site's daemon")
    recipe = _recipe(wanted, folder)
    held = export_site.kept(folder, wanted.run, None if models.is_installed(recipe) else wanted.round)
    if not models.is_installed(recipe):
        made = models.trained_model(recipe, held, wanted.allowed)
        return made, _own_scores(wanted, held, made.round)
    base = None
    if models.needs_base(recipe, held):
        base = _base(wanted, folder, held)
    elif wanted.round is not None:
        held = export_site.kept(folder, wanted.run, wanted.round)
    data = _data(wanted, recipe, held) if models.mixes_by_data(recipe) else None
    made = models.installed_model(recipe, held, base, data, wanted.allowed)
    return made, _own_scores(wanted, held, made.round)


def _base(wanted: ExportRequest, folder: Path, held: KeptRound) -> export_site.Base:
    """What the site was sent: as the server's state has it, or else the newest that the site still has."""
    found = _published(wanted, wanted.round)
    if found is not None:
        return export_site.Base(found.address, found.round, models.sent_to(found, held.site))
    base = export_site.newest_base(folder, wanted.run, held)
    if wanted.round not in (None, base.round):
        raise ConfigError(
            f"the newest model that the site was sent is of round {base.round}, not {wanted.round}; leave out --round, "
            "or give the server's state with --state"
        )
    return base


def _published(wanted: ExportRequest, round: int | None) -> PublishedState | None:
    if wanted.state is not None:
        return published_states.of_folder(wanted.state, wanted.run, round)
    return None if wanted.operator is None else published_states.of_server(wanted.operator, wanted.run, round)


def _recipe(wanted: ExportRequest, folder: Path) -> Recipe:
    if wanted.state is not None:
        known = published_states.recipe_in(wanted.state, wanted.run)
        _check_recipe(wanted, known)
        return known
    if wanted.recipe is not None:
        return wanted.recipe
    try:
        return export_site.offered_recipe(folder, wanted.run)
    except ConfigError as error:
        raise ConfigError(f"{error}; or give the run's --recipe") from error


def _check_recipe(wanted: ExportRequest, known: Recipe) -> None:
    given = wanted.recipe
    if given is not None and given.model_copy(update={"name": known.name}).wire() != known.wire():
        raise ConfigError(f"--recipe is not that of run '{known.name}': they differ; leave it out")


def _data(wanted: ExportRequest, recipe: Recipe, held: KeptRound) -> SiteData:
    """The site's own data: of its daemon's settings, or of a simulation's recipe."""
    from protofed.client.data.site import load_site, load_sites
    from protofed.deploy.simulation.simulation import site_names

    if wanted.site_data is not None:
        return load_site(*wanted.site_data, recipe.input, recipe.classes, class_names=recipe.class_names)
    if wanted.recipe is not None and wanted.recipe.data is not None:
        sites = load_sites(wanted.recipe.data, recipe.input, recipe.classes, class_names=recipe.class_names)
        return dict(zip(site_names(len(sites)), sites, strict=True))[held.site]
    raise ConfigError(
        f"with method {recipe.method.name} the site mixes by its own class frequencies: give --settings, those of its "
        "daemon (of a simulation: --recipe with its [data])"
    )


def _own_scores(wanted: ExportRequest, held: KeptRound, round: int) -> ModelScores:
    if wanted.state is None:
        return ModelScores(
            of="a site does not keep the scores that it reported; `protofed report` on the server has them"
        )
    values = published_states.scores_in(wanted.state, wanted.run, round).get(held.site, {})
    own = {name: value for name, value in values.items() if name.startswith("personal.")}
    return ModelScores(
        of=_of(f"by site {held.site}", round) if own else f"none were taken after round {round}", values=own
    )


def _scored(found: PublishedState, prefix: str, where: str) -> ModelScores:
    values = {name: one.mean for name, one in spreads(found.scores).items() if name.startswith(prefix)}
    return ModelScores(
        of=_of(where, found.round) if values else f"none were taken after round {found.round}", values=values
    )


def _of(where: str, round: int) -> str:
    return f"recorded in the run after round {round}, {where}"


def _spec(wanted: ExportRequest, made: BuiltModel) -> Spec:
    recipe = made.recipe
    return Spec(architecture=recipe.model, head=made.model.head, input=recipe.input, classes=_names(wanted, recipe))


def _origin(wanted: ExportRequest, made: BuiltModel, weights: Payload) -> Origin:
    return Origin(
        kind=made.kind,
        site=made.site,
        run=wanted.run,
        round=made.round,
        method=made.recipe.method,
        recipe=made.recipe.fingerprint(),
        state=made.state,
        weights=codec.digest(codec.encode(weights)),
        protofed=VERSION,
        at=f"{utc_now():%Y-%m-%dT%H:%M:%SZ}",
    )


def _names(wanted: ExportRequest, recipe: Recipe) -> tuple[str, ...]:
    """Of the classes: those that are given, the run's, those of a well-known data set, or numbers."""
    if wanted.classes is not None:
        return model_folder.read_names(wanted.classes, recipe.classes)
    from protofed.deploy.figures.style import class_names  # matplotlib

    return tuple(class_names(wanted.recipe or recipe))
