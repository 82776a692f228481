"""Which model is exported: all sites' together, one class's of cwFedAVG, or a site's own, as it predicts with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import protofed.client.methods
import protofed.server.methods  # noqa: F401  (both register their halves)
from protofed.client.agent.site import check_model
from protofed.client.data.site_data import Examples, SiteData
from protofed.client.method import client_methods
from protofed.client.models.catalogue import build
from protofed.client.models.inference import DeployedModel, put_head
from protofed.client.models.split import SplitModel, load
from protofed.client.training.context import FitContext
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import Part, Payload, SiteId
from protofed.deploy.export.published_states import PublishedState
from protofed.deploy.export.site_state import Base, KeptRound
from protofed.deploy.simulation.simulation import EVALUATOR
from protofed.server.method import ServerMethod, server_methods
from protofed.server.methods.cwfedavg import CwFedAvgServer
from protofed.server.methods.cwfedavg_private import CwFedAvgPrivateServer

KINDS = "global, class:N or personal"
INSTEAD = {  # of a global model
    "cwfedavg": "take --model class:N for a class's, or --model personal at a site",
    "cwfedavg-private": "take --model class:N for the body with a class's head, or --model personal at a site",
    "solo": "every site trains alone; take --model personal at a site",
}


@dataclass(frozen=True)
class BuiltModel:
    """A model and what it was made of; `state` is None where nothing that a server published went into it."""

    model: DeployedModel
    recipe: Recipe
    kind: str
    round: int
    state: Digest | None
    site: SiteId | None = None


def read_kind(said: str) -> tuple[str, int | None]:
    """`global`, `personal`, or `class` with its number.

    Raises:
        ConfigError: anything else.
    """
    kind, colon, number = said.partition(":")
    if said in ("global", "personal"):
        return said, None
    if kind == "class" and colon and number.isascii() and number.isdigit():
        return kind, int(number)
    raise ConfigError(f"--model {said[:40]}: expected {KINDS}")


def global_model(found: PublishedState, allowed: frozenset[str] = frozenset()) -> BuiltModel:
    """What an evaluator scores: body and head, or body and prototypes, as the method predicts with them.

    Raises:
        ConfigError: the method has no global model, or the architecture cannot be built here.
    """
    recipe, half = found.recipe, _server_half(found.recipe)
    if not half.global_model:
        instead = INSTEAD.get(recipe.method.name, "take --model personal at a site")
        raise ConfigError(f"method {recipe.method.name} has no global model; {instead}")
    model = _fresh(recipe, allowed)
    _install(model, recipe, found.round, half.broadcast(found.state, EVALUATOR), {})
    return BuiltModel(DeployedModel(model, recipe.input), recipe, "global", found.round, found.address)


def class_model(found: PublishedState, c: int, allowed: frozenset[str] = frozenset()) -> BuiltModel:
    """The global model of one class, of cwFedAVG; of the private one, the body with that class's head.

    Raises:
        ConfigError: the method has no such models, or the run no such class.
    """
    recipe, half = found.recipe, _server_half(found.recipe)
    if not isinstance(half, CwFedAvgServer | CwFedAvgPrivateServer):
        raise ConfigError(f"method {recipe.method.name} has no models by class; only cwfedavg and cwfedavg-private do")
    if not 0 <= c < recipe.classes:
        raise ConfigError(
            f"--model class:{c}: the run has {recipe.classes} classes; expected 0 to {recipe.classes - 1}"
        )
    model, payload = _fresh(recipe, allowed), half.class_model(found.state, c)
    load(model.body, payload[Part.BODY])
    load(model.head, payload[Part.HEAD])
    return BuiltModel(DeployedModel(model, recipe.input), recipe, f"class:{c}", found.round, found.address)


def trained_model(recipe: Recipe, held: KeptRound, allowed: frozenset[str] = frozenset()) -> BuiltModel:
    """A site's own model where that is what its training left."""
    half = client_methods.build(recipe.method.name, recipe.method.options)
    model = _fresh(recipe, allowed)
    put_head(model, held.personal, recipe.classes, by_own=getattr(half, "prediction", "") == "head")
    made = DeployedModel(model, recipe.input)
    return BuiltModel(made, recipe, "personal", held.round, held.started_from, held.site)


def installed_model(
    recipe: Recipe, held: KeptRound, base: Base | None, data: SiteData | None, allowed: frozenset[str] = frozenset()
) -> BuiltModel:
    """A site's own model where that is made of what it was sent last and of what it remembers.

    Args:
        base: None: the method needs none.
        data: the site's; None: the method does not look at it.
    """
    model = _fresh(recipe, allowed)
    number = held.round if base is None else base.round
    _install(model, recipe, number, {} if base is None else base.payload, held.memory, data)
    made = DeployedModel(model, recipe.input)
    return BuiltModel(made, recipe, "personal", number, None if base is None else base.address, held.site)


def sent_to(found: PublishedState, site: SiteId) -> Payload:
    """What a site is sent of a state."""
    return _server_half(found.recipe).broadcast(found.state, site)


def needs_base(recipe: Recipe, held: KeptRound) -> bool:
    """Whether a site's own model is made of what the server sent, as the site was sent it."""
    return is_installed(recipe) and Part.BODY not in held.memory


def is_installed(recipe: Recipe) -> bool:
    """Whether a site predicts with what `install` makes, not with what its last training left."""
    return client_methods.build(recipe.method.name, recipe.method.options).personal == "installed"


def mixes_by_data(recipe: Recipe) -> bool:
    """Whether a site's own model depends on its class frequencies, which nobody else knows."""
    return recipe.method.name == "cwfedavg-private"


def _server_half(recipe: Recipe) -> ServerMethod:
    return server_methods.build(recipe.method.name, recipe.method.options)


def _fresh(recipe: Recipe, allowed: frozenset[str]) -> SplitModel:
    """Its own parameters are all replaced; those that torch draws meanwhile change nobody else's."""
    check_model(recipe.model, recipe.input, recipe.classes)
    with torch.random.fork_rng(devices=[]):
        return build(recipe.model, recipe.input, recipe.classes, allowed)


def _install(
    model: SplitModel, recipe: Recipe, round: int, received: Payload, memory: Payload, data: SiteData | None = None
) -> None:
    """As a site does before it predicts."""
    blank = Examples(torch.zeros(1, *recipe.input.shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    local = FitContext(
        site=EVALUATOR,
        round=round,
        rounds=recipe.rounds,
        model=model,
        data=data or SiteData.for_scoring(blank, recipe.input, recipe.classes),
        classes=recipe.classes,
        plan=recipe.plan,
        rng=torch.Generator().manual_seed(0),
        memory={part: dict(tensors) for part, tensors in memory.items()},
    )
    client_methods.build(recipe.method.name, recipe.method.options).install(local, received)
