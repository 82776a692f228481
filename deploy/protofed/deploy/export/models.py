"""Build the model to export: the global one, one class's (cwFedAVG), or the one that a site predicts with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protofed.client.agent.site import check_model
from protofed.client.data.site_data import Examples, SiteData
from protofed.client.method import client_methods
from protofed.client.models.catalogue import build
from protofed.client.models.inference import DeployedModel, put_head
from protofed.client.models.split import SplitModel, load
from protofed.client.training.context import FitContext
from protofed.client.training.own_buffers import with_own_buffers
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import Part, Payload, SiteId
from protofed.deploy.export.published_states import PublishedState
from protofed.deploy.export.site_state import Base, KeptRound
from protofed.deploy.simulation.simulation import EVALUATOR
from protofed.server.methods.cwfedavg import CwFedAvgServer
from protofed.server.methods.cwfedavg_private import CwFedAvgPrivateServer
from protofed.server.rounds.broadcast import sent
from protofed.server.rounds.resume import method_of

KINDS = "global, class:N or personal"
INSTEAD = {  # what to export if the method has no global model
    "cwfedavg": "take --model class:N for a class's, or --model personal at a site",
    "cwfedavg-private": "take --model class:N for the body with a class's head, or --model personal at a site",
    "solo": "every site trains alone; take --model personal at a site",
}


@dataclass(frozen=True)
class BuiltModel:
    """A model and its origin.

    Attributes:
        kind: global, class:N or personal.
        round: whose published state or training it comes from.
        state: digest of the published state, or of the model that the site was sent; None if no server's was used.
    """

    model: DeployedModel
    recipe: Recipe
    kind: str
    round: int
    state: Digest | None
    site: SiteId | None = None


def read_kind(text: str) -> tuple[str, int | None]:
    """Parse --model: `global`, `personal`, or `class` and its index.

    Raises:
        ConfigError: the text is none of these.
    """
    kind, colon, number = text.partition(":")
    if text in ("global", "personal"):
        return text, None
    if kind == "class" and colon and number.isascii() and number.isdigit():
        return kind, int(number)
    raise ConfigError(f"--model {text[:40]}: expected {KINDS}")


def global_model(published: PublishedState, allowed: frozenset[str] = frozenset()) -> BuiltModel:
    """The model that an evaluator scores: the body with the head or the prototypes, as the method predicts.

    Raises:
        ConfigError: the method has no global model, or the architecture cannot be built here.
    """
    recipe, half = published.recipe, method_of(published.recipe)
    if not half.global_model:
        instead = INSTEAD.get(recipe.method.name, "take --model personal at a site")
        raise ConfigError(f"method {recipe.method.name} has no global model; {instead}")
    model = _fresh(recipe, allowed)
    _install(model, recipe, published.round, sent(half, published.state, EVALUATOR), {})
    return BuiltModel(DeployedModel(model, recipe.input), recipe, "global", published.round, published.address)


def class_model(published: PublishedState, c: int, allowed: frozenset[str] = frozenset()) -> BuiltModel:
    """The model of class `c`: that class's global model (cwfedavg), or the body with its head (cwfedavg-private).

    Raises:
        ConfigError: the method has no models by class, or the run has no such class.
    """
    recipe, half = published.recipe, method_of(published.recipe)
    if not isinstance(half, CwFedAvgServer | CwFedAvgPrivateServer):
        raise ConfigError(f"method {recipe.method.name} has no models by class; only cwfedavg and cwfedavg-private do")
    if not 0 <= c < recipe.classes:
        raise ConfigError(
            f"--model class:{c}: the run has {recipe.classes} classes; expected 0 to {recipe.classes - 1}"
        )
    model, payload = _fresh(recipe, allowed), half.class_model(published.state, c)
    load(model.body, payload[Part.BODY])
    load(model.head, payload[Part.HEAD])
    return BuiltModel(DeployedModel(model, recipe.input), recipe, f"class:{c}", published.round, published.address)


def trained_model(recipe: Recipe, kept_round: KeptRound, allowed: frozenset[str] = frozenset()) -> BuiltModel:
    """A site's own model, for methods that predict with what the last training left."""
    half = client_methods.build(recipe.method.name, recipe.method.options)
    model = _fresh(recipe, allowed)
    put_head(model, kept_round.personal, recipe.classes, by_own=getattr(half, "prediction", "") == "head")
    deployed = DeployedModel(model, recipe.input)
    return BuiltModel(deployed, recipe, "personal", kept_round.round, kept_round.started_from, kept_round.site)


def installed_model(
    recipe: Recipe,
    kept_round: KeptRound,
    base: Base | None,
    data: SiteData | None,
    allowed: frozenset[str] = frozenset(),
) -> BuiltModel:
    """A site's own model, for methods that build it from the last received model and the site's memory.

    Args:
        base: the model that the site was sent; None if the method needs none.
        data: the site's own data; None if the method does not use them.
    """
    model = _fresh(recipe, allowed)
    number = kept_round.round if base is None else base.round
    _install(model, recipe, number, {} if base is None else base.payload, kept_round.memory, data)
    deployed = DeployedModel(model, recipe.input)
    return BuiltModel(deployed, recipe, "personal", number, None if base is None else base.address, kept_round.site)


def sent_to(published: PublishedState, site: SiteId) -> Payload:
    """The payload that the server sends to a site for a state."""
    return sent(method_of(published.recipe), published.state, site)


def needs_base(recipe: Recipe, kept_round: KeptRound) -> bool:
    """Whether a site's own model needs the model that the server sent; not if the site's memory has a body."""
    return is_installed(recipe) and Part.BODY not in kept_round.memory


def is_installed(recipe: Recipe) -> bool:
    """Whether a site predicts with the model that `install` builds, not with what its last training left."""
    return client_methods.build(recipe.method.name, recipe.method.options).personal == "installed"


def mixes_by_data(recipe: Recipe) -> bool:
    """Whether a site's own model depends on its class frequencies, which only the site knows."""
    return recipe.method.name == "cwfedavg-private"


def _fresh(recipe: Recipe, allowed: frozenset[str]) -> SplitModel:
    """A new model. All its parameters are replaced, so their random values must not advance torch's global RNG."""
    check_model(recipe.model, recipe.input, recipe.classes)
    with torch.random.fork_rng(devices=[]):
        return build(recipe.model, recipe.input, recipe.classes, allowed)


def _install(
    model: SplitModel, recipe: Recipe, round: int, received: Payload, memory: Payload, data: SiteData | None = None
) -> None:
    """Install the received payload and memory in the model, as a site does before it predicts."""
    # Methods that do not use the data still get a context with some: one black image.
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
    half = client_methods.build(recipe.method.name, recipe.method.options)
    half.install(local, with_own_buffers(received, local))
