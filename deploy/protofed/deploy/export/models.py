"""Build the model to export: the global model, one class's model, or the model that a site predicts with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.method import ClientMethod, client_methods
from protofed.client.models.catalogue import build
from protofed.client.models.inference import DeployedModel
from protofed.client.models.split import SplitModel, dump, load
from protofed.client.site import check_model
from protofed.client.task import build_client_task
from protofed.client.training.context import FitContext, with_own_buffers
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import Part, Payload, SiteId, Tensors
from protofed.deploy.export.kept_states import Base, KeptRound, PublishedState
from protofed.deploy.simulation.simulation import EVALUATOR
from protofed.server.method import ClasswiseMethod, sent, server_methods
from protofed.server.rounds.context import build_method, round_context

KINDS = "global, class:N or personal"


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
        ConfigError: the text is none of the three.
    """
    kind, colon, number = text.partition(":")
    if text in ("global", "personal"):
        return text, None
    if kind == "class" and colon and number.isascii() and number.isdigit():
        return kind, int(number)
    raise ConfigError(f"--model {text[:40]}: expected {KINDS}")


def global_model(published: PublishedState, allowed: frozenset[str] = frozenset()) -> BuiltModel:
    """The model that an evaluator scores: what the method installs there.

    Raises:
        ConfigError: the method has no global model, or the architecture cannot be built here.
    """
    recipe, half = published.recipe, build_method(published.recipe)
    if not half.global_model:
        by_class = "--model class:N for a class's, or " if isinstance(half, ClasswiseMethod) else ""
        raise ConfigError(f"method {recipe.method.name} has no global model; take {by_class}--model personal at a site")
    local = _context(recipe, EVALUATOR, published.round, allowed)
    _client_half(recipe).load_global(local, sent(half, published.state, EVALUATOR))
    return BuiltModel(_deployed(local.model, recipe), recipe, "global", published.round, published.address)


def class_model(published: PublishedState, c: int, allowed: frozenset[str] = frozenset()) -> BuiltModel:
    """The model of class `c`, as the method's server half makes it.

    Raises:
        ConfigError: the method has no models by class, or the run has no such class.
    """
    recipe, half = published.recipe, build_method(published.recipe)
    if not isinstance(half, ClasswiseMethod):
        having = " and ".join(name for name in server_methods if hasattr(server_methods.get(name), "class_model"))
        raise ConfigError(f"method {recipe.method.name} has no models by class; of protofed's only {having} do")
    if not 0 <= c < recipe.classes:
        raise ConfigError(
            f"--model class:{c}: the run has {recipe.classes} classes; expected 0 to {recipe.classes - 1}"
        )
    model = _fresh(recipe, allowed)
    _load(model, half.class_model(published.state, c))
    return BuiltModel(_deployed(model, recipe), recipe, f"class:{c}", published.round, published.address)


def personal_model(
    recipe: Recipe,
    kept_round: KeptRound,
    base: Callable[[], Base],
    data: Callable[[], SiteData],
    allowed: frozenset[str] = frozenset(),
) -> BuiltModel:
    """The model that a site predicts with: what the method installs there, and for most methods then trained.

    Args:
        base: the model that the site was sent; called only if the method makes the site's own model from it.
        data: the site's own data; likewise.

    Raises:
        ConfigError: the architecture cannot be built here; what `base` and `data` raise.
        CodecError: what the site keeps is of another model.
    """
    half, site = _client_half(recipe), kept_round.site
    local = _context(recipe, site, kept_round.round, allowed, kept_round.client_state, data)
    if half.declares.personal == "loaded":
        received = _OnDemand(base)
        half.load_global(local, with_own_buffers(received, local))
        sent = received.used
        number, address = (kept_round.round, None) if sent is None else (sent.round, sent.address)
    else:
        half.load_global(local, _first_broadcast(recipe, local.model, site))  # for the head, whose numbers are kept
        _load(local.model, kept_round.personal)
        number, address = kept_round.round, kept_round.started_from
    return BuiltModel(_deployed(local.model, recipe), recipe, "personal", number, address, site)


def sent_to(published: PublishedState, site: SiteId) -> Payload:
    """The payload that the server sends to a site for a state."""
    return sent(build_method(published.recipe), published.state, site)


class _Context(FitContext):
    """The context of an `load_global`: data are loaded when the method asks for them, which few do to predict."""

    load_data: Callable[[], SiteData] | None = None  # None: an evaluator's, which has no examples to make a model of

    @property
    def data(self) -> SiteData:
        """The site's own."""
        return self._blank if self.load_data is None else self.load_data()

    @data.setter
    def data(self, blank: SiteData) -> None:
        self._blank = blank


class _OnDemand(Mapping[Part, Tensors]):
    """What a site was sent, read when the method looks into it: some predict with what the site alone has.

    Attributes:
        used: None: nobody has looked into it.
    """

    def __init__(self, base: Callable[[], Base]) -> None:
        self._base = base
        self.used: Base | None = None

    @cached_property
    def _payload(self) -> Payload:
        self.used = self._base()
        return self.used.payload

    def __getitem__(self, part: Part) -> Tensors:
        return self._payload[part]

    def __iter__(self) -> Iterator[Part]:
        return iter(self._payload)

    def __len__(self) -> int:
        return len(self._payload)


def _context(
    recipe: Recipe,
    site: SiteId,
    round: int,
    allowed: frozenset[str],
    client_state: Payload | None = None,
    load_data: Callable[[], SiteData] | None = None,
) -> FitContext:
    """What a site or an evaluator has before it predicts: a new model, and for most methods nothing else that counts.

    Raises:
        ConfigError: the architecture cannot be built here.
    """
    image = Examples(torch.zeros(1, *recipe.input.shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    local = _Context(
        site=site,
        round=round,
        rounds=recipe.rounds,
        model=_fresh(recipe, allowed),
        data=SiteData.for_scoring(image, recipe.input, recipe.classes),
        classes=recipe.classes,
        plan=recipe.plan,
        rng=torch.Generator().manual_seed(0),
        client_state={part: dict(tensors) for part, tensors in (client_state or {}).items()},
    )
    local.load_data = load_data
    return local


def _deployed(model: SplitModel, recipe: Recipe) -> DeployedModel:
    return DeployedModel(model, recipe.input, build_client_task(recipe.task))


def _client_half(recipe: Recipe) -> ClientMethod:
    return client_methods.build(recipe.method.name, recipe.method.options)


def _first_broadcast(recipe: Recipe, model: SplitModel, site: SiteId) -> Payload:
    """What a site is sent in round 1 of a run that begins with this model."""
    half, weights = build_method(recipe), {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}
    return sent(half, half.init(weights, round_context(recipe, 0, recipe.federation.min_sites)), site)


def _fresh(recipe: Recipe, allowed: frozenset[str]) -> SplitModel:
    """A new model. All its parameters are replaced, so their random values must not advance torch's global RNG."""
    check_model(recipe.model, recipe.input, recipe.classes)
    with torch.random.fork_rng(devices=[]):
        return build(recipe.model, recipe.input, recipe.classes, allowed)


def _load(model: SplitModel, payload: Payload) -> None:
    load(model.body, payload[Part.BODY])
    load(model.head, payload[Part.HEAD])
