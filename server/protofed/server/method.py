"""What a method does on the server, and all that the author of a server algorithm needs.

A server algorithm is a frozen dataclass that is a `ServerMethod`: NumPy only, pure functions over payloads. Its fields
are the options that a recipe may set. What this module exports stays. The methods of protofed import only this module
and what they share: `methods/mixtures` and `methods/maximal_separation`, the mathematics of one paper each, which may
change. Your own package imports only this module, too. `protofed new method NAME` writes one, and
`protofed.common.plugins` says how a recipe names it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol, cast, runtime_checkable

from protofed.common.errors import ConfigError, StateError
from protofed.common.payload import (
    Array,
    ContributorMeans,
    Mean,
    Part,
    Payload,
    SiteId,
    Tensors,
    TensorSpec,
    Update,
    describe,
    distance_norm,
    is_buffer,
    towards,
    unit,
    weights,
)
from protofed.common.plugins import ONE_CLASS, Method, Registry
from protofed.common.secure_aggregation.linear_form import ClassRows, SumForm, Sums, Weighting

__all__ = [
    "NOTHING",
    "ONE_CLASS",
    "Array",
    "ClassRows",
    "ClasswiseMethod",
    "ConfigError",
    "ContributorMeans",
    "ExpectedUpdate",
    "JoiningMethod",
    "Mean",
    "Method",
    "OwnStartMethod",
    "Part",
    "Payload",
    "RefiningServerMethod",
    "RoundContext",
    "ServerMethod",
    "SiteId",
    "StateError",
    "SumForm",
    "SummableServerMethod",
    "Sums",
    "TensorSpec",
    "Tensors",
    "Update",
    "Weighting",
    "describe",
    "distance_norm",
    "is_buffer",
    "like",
    "prototype_rows",
    "server_methods",
    "towards",
    "unit",
    "weigh",
    "weighted_mean",
    "weights",
]


@dataclass(frozen=True)
class ExpectedUpdate:
    """What an update must look like, tensor by tensor.

    Attributes:
        required: tensors that every update has.
        optional: tensors that it may have (a class that the site does not hold has no prototype).
        weight: the update must disclose its total example count.
    """

    required: tuple[TensorSpec, ...]
    optional: tuple[TensorSpec, ...] = ()
    weight: bool = False


NOTHING = ExpectedUpdate(())


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """The round that makes a state: a function of the ledger's rows alone, so that the state can be made again.

    Attributes:
        round: of the state that is made; 0 of the first one.
        rounds: of the run.
        sites: N: trainers that were enrolled and took tasks when the round was opened, drawn for it or not. The
            number is recorded with the round. It changes if sites come, are excluded or pause between rounds. Round 0
            needs only two sites, so others may come later.
        classes: C.
        seed: of the run, as NumPy takes it: not below zero.
    """

    round: int
    rounds: int
    sites: int
    classes: int
    seed: int


class ServerMethod(Protocol):
    """The server half of a method."""

    global_model: ClassVar[bool]  # whether there is a model of all sites that an evaluator can score

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """The state before round 1, from a freshly made model (BODY, and HEAD with `weight` [C, D])."""

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """What a site is sent; the same object for all sites if it is the same for all."""

    def expects(self, state: Payload) -> ExpectedUpdate:
        """What an update must look like in this state."""

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """The next state; `updates` come in site order and can be read once."""


@runtime_checkable
class ClasswiseMethod(ServerMethod, Protocol):
    """A server half with a model of each class, which `protofed export` can write."""

    def class_model(self, state: Payload, c: int) -> Payload:
        """The model of class `c`, BODY and HEAD."""


class SummableServerMethod(ServerMethod, Protocol):
    """A server algorithm that needs only sums: it may run with `federation.secure = true`.

    It then sends the same to all sites, because updates from different starting models are never aggregated. Its client
    algorithm has the same `sum_form`.
    """

    def sum_form(self) -> SumForm:
        """What is aggregated.

        Raises:
            ConfigError: nothing, with these options; the text says why.
        """

    def from_sums(self, state: Payload, sums: Sums, context: RoundContext) -> Payload:
        """The next state, as `aggregate` makes it from the aggregated updates."""


class OwnStartMethod(ServerMethod, Protocol):
    """A server half whose sites do not train from what they are sent, but from a model of their own or their choice."""

    def start(self, state: Payload, site: SiteId, update: Payload) -> Payload:
        """What a site that is sent this state trained from, as far as the server knows it; a pure function.

        The norm of its update is taken from here, and bounded by this model's. May be called from any thread.

        Args:
            update: of the names and shapes that `expects` asks for; its numbers may be any, and need not be finite.
        """


class JoiningMethod(ServerMethod, Protocol):
    """A server half that sends a site what follows from the site's own last update, beside the models of all."""

    def joined(self, state: Payload, update: Update) -> Payload:
        """The state once the update of a site that took no part is known, which counts in nothing that others get."""


class RefiningServerMethod(ServerMethod, Protocol):
    """A server half whose states need PyTorch: an evaluator makes of each round's aggregate what the round publishes.

    Its client half has `refine`. Round 0 publishes what `init` makes, as of any method.
    """

    def to_refine(self, state: Payload) -> Payload:
        """What the evaluator is sent of an aggregate; models of single sites go as SITE_MODELS."""

    def expects_refined(self, state: Payload) -> ExpectedUpdate:
        """What it sends back of this aggregate must look like."""

    def refined(self, state: Payload, update: Update, context: RoundContext) -> Payload:
        """The state that the round publishes, from an aggregate and from what the evaluator made of the aggregate."""


def refining(method: ServerMethod) -> RefiningServerMethod | None:
    """The method, if an evaluator refines its states."""
    return cast("RefiningServerMethod", method) if hasattr(method, "refined") else None


def joined(method: ServerMethod, state: Payload, update: Update) -> Payload:
    """As `JoiningMethod.joined`; of other methods the state itself: what they send does not follow from it."""
    return cast("JoiningMethod", method).joined(state, update) if hasattr(method, "joined") else state


server_methods: Registry[ServerMethod] = Registry(
    "method",
    half="server",
    home="protofed.server.methods",
    protocols=(
        ServerMethod,
        ClasswiseMethod,
        SummableServerMethod,
        OwnStartMethod,
        JoiningMethod,
        RefiningServerMethod,
    ),
)


def weigh(update: Update, weighting: Weighting) -> float:
    """What an update counts in a mean: 1, or the site's number of examples.

    Raises:
        StateError: the number is not there, though `ExpectedUpdate.weight` asks for it before an update is accepted.
    """
    if weighting == "uniform":
        return 1.0
    if update.weight is None:
        raise StateError(f"the update of {update.site} has no example count; expected one in every accepted update")
    return update.weight


def weighted_mean(updates: Iterable[Update], parts: Iterable[Part], weighting: Weighting) -> Payload:
    """sum_k p_k x_k over the given parts x of the updates, which are read once.

    Raises:
        StateError: as of `weigh`.
    """
    mean = Mean(parts)
    for update in updates:
        mean.add(update.payload, weigh(update, weighting))
    return mean.result()


def like(state: Payload, *parts: Part) -> tuple[TensorSpec, ...]:
    """The tensors of the given parts of a state, as an update must have them."""
    return describe({part: state[part] for part in parts if part in state})


def prototype_rows(matrix: Array) -> tuple[TensorSpec, ...]:
    """One prototype [D] a class, of the shape and dtype of a matrix [C, D]."""
    return tuple(TensorSpec(Part.PROTOTYPES, str(c), matrix.dtype.name, matrix.shape[1:]) for c in range(len(matrix)))


def sent(method: ServerMethod, state: Payload, site: SiteId) -> Payload:
    """A method's broadcast to a site, without what stays on the server; the same object, if nothing stays."""
    return drop_private(method.broadcast(state, site))


def drop_private(payload: Payload) -> Payload:
    """A payload without what stays on the server; the same object, if nothing stays."""
    if Part.PRIVATE not in payload:
        return payload
    return {part: tensors for part, tensors in payload.items() if part is not Part.PRIVATE}
