"""What a site computes for a task, a fit's outcome or a model's scores, apart from all that decides whether it does.

A fit's outcome is without what a unit learnt from very few images: rule `min_images_per_unit`. A unit with a ReLU gets
a gradient only from the images for which it is active. If that is a single image, its row moves by this image times a
number. Such a unit's rows, and the weights of the next layer that read it, leave as received.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from protofed.client.data.site_data import SiteData
from protofed.client.models.split import SplitModel, choose_start, dump, load
from protofed.client.policy.update_checks import PolicyRefusedError
from protofed.client.site import DaemonStatus, PreparedRun, Site, Train, trains_to_its_end
from protofed.client.state.store import FitOutcome, SiteState
from protofed.client.task import Predictions
from protofed.client.training.context import (
    Checkpoints,
    FitContext,
    FitStart,
    NoCheckpoints,
    client_state_with_buffers,
    with_own_buffers,
)
from protofed.client.training.evaluation import GLOBAL, compute_scores, of_personal, on_local_test, on_test
from protofed.common import codec
from protofed.common.config.recipe import Federation
from protofed.common.failpoint import reach
from protofed.common.payload import NOT_A_MOVE, Array, Part, Payload, SiteId, Tensors, distance_norm, relative_bound
from protofed.common.protocol.messages import Scores, Task
from protofed.common.secure_aggregation.score_sums import LARGEST

RECTIFIERS = (nn.ReLU, nn.ReLU6)  # as modules: a plug-in that calls functions instead is not seen
BATCH = 512  # images at a time, as in evaluation
Observer = Callable[[str, nn.Module, Tensor, Tensor], None]  # name, module, its input and its output


class ScoredModel(StrEnum):
    """Which model is scored, and on what."""

    OWN = "own"  # the site's, on all test sets that it has
    GLOBAL_LOCALLY = "global-locally"  # the global one, on the site's own test set
    GLOBAL = "global"  # the global one, on the test set that all share


@dataclass(frozen=True, eq=False)
class Computation:
    """Everything on which a result depends, but the base: a site that has the same computes the same.

    Attributes:
        state: of the site, from which it starts; empty for scores of the global model.
        fewest: as `withhold_rare_units` takes it.
        scored: None: it is a fit.
        to_its_end: as in `FitContext`.
    """

    site: SiteId
    run: PreparedRun
    task: Task
    state: SiteState
    fewest: int = 1
    scored: ScoredModel | None = None
    to_its_end: bool = False

    @classmethod
    def for_fit(cls, site: Site, run: PreparedRun, task: Task) -> Computation:
        """A site's fit, from what it kept of the last round that counts."""
        state = site.store.last_counted(task.run, task.state_before)
        fewest = site.policy.rules.min_images_per_unit
        return cls(site.name, run, task, state, fewest, to_its_end=trains_to_its_end(site, run))

    @property
    def key(self) -> Hashable:
        """Equal for computations with the same result."""
        return self.site, self.task.task_id, self.state.round, self.scored


class RemoteExecutor(Protocol):
    """Other processes that compute for this site; the results are those that it would have itself."""

    def fit(self, work: Computation) -> FitOutcome | None:
        """A fit's outcome; None: the site must compute it itself."""

    def score(self, work: Computation) -> Scores | None:
        """A model's scores; None: the site must compute them itself."""


class NoRemoteExecutor:
    """There are no other processes."""

    def fit(self, work: Computation) -> None:
        """Always None."""

    def score(self, work: Computation) -> None:
        """Always None."""


def fit(work: Computation, base: Payload, status: DaemonStatus, checkpoints: Checkpoints, train: Train) -> FitOutcome:
    """What a fit leaves: its update, without what rare units learnt, and the state that the site keeps.

    Of a fit that diverged and went on to its end nothing leaves (`withheld`), and nothing is kept.

    Args:
        train: `Site.fit`.

    Raises:
        PolicyRefusedError: as of `withhold_rare_units`.
    """
    local = work.run.fit_context(work.site, work.task, work.state, status, checkpoints)
    local.to_its_end = work.to_its_end
    received = FitStart(choose_start(base, local.data.label_frequencies))
    update = train(work.run, work.task, local, with_own_buffers(base, local))
    reach("fit-done")
    client_state = client_state_with_buffers(local, update.payload, work.state.client_state)
    start = local.start or received
    sent = start.sent or start.model
    leaving = withhold_rare_units(
        update.payload,
        sent,
        local.model,
        local.data,
        work.fewest,
        first=start.model,
        trained=local.sent_model,
        check=local.check,
    )
    if work.run.recipe.federation.secure:
        leaving = within_bounds(leaving, sent, work.run.recipe.federation)
    client_state = _moved_by_what_leaves(client_state, update.payload, leaving)
    personal = {Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}
    outcome = FitOutcome(replace(update, payload=leaving), client_state, personal)
    return outcome if not work.to_its_end or _is_finite(outcome) else _with_numbers(outcome, work.state)


def _is_finite(outcome: FitOutcome) -> bool:
    payloads = (outcome.update.payload, outcome.client_state, outcome.personal)
    return all(codec.first_not_finite(payload) is None for payload in payloads) and all(
        map(math.isfinite, outcome.update.metrics.values())
    )


def _with_numbers(outcome: FitOutcome, before: SiteState) -> FitOutcome:
    """A diverged fit's: an update of the same parts, names and shapes as any other's, and what the site had before."""
    metrics = {name: value if math.isfinite(value) else LARGEST for name, value in outcome.update.metrics.items()}
    update = replace(outcome.update, payload=_finite(outcome.update.payload), metrics=metrics)
    trained = replace(outcome.trained, withheld=True)
    return FitOutcome(update, before.client_state, before.personal or _finite(outcome.personal), trained)


def _finite(payload: Payload) -> Payload:
    return {
        part: {name: np.nan_to_num(array, posinf=0, neginf=0) for name, array in tensors.items()}
        for part, tensors in payload.items()
    }


def _moved_by_what_leaves(client_state: Payload, trained: Payload, leaving: Payload) -> Payload:
    """The memory, whose control variates move by what leaves of their update, as the server's do (METHODS §5.3)."""
    own, computed, sent = (payload.get(Part.CONTROL, {}) for payload in (client_state, trained, leaving))
    moved = {path: np.asarray(own[path] + (sent[path] - computed[path])) for path in own.keys() & sent.keys()}
    return {**client_state, Part.CONTROL: {**own, **moved}} if moved else client_state


def score(work: Computation, base: Payload, status: DaemonStatus) -> Scores:
    """The scores of a model, by name."""
    run = work.run
    if work.scored is not ScoredModel.GLOBAL:
        return compute_scores(predictions(work, base, status), run.data, run.recipe)
    local = _context(work, status)
    run.method.load_global(local, base)
    return on_test(run.model, run.data, run.recipe, local.check)


def predictions(work: Computation, base: Payload, status: DaemonStatus) -> dict[str, Predictions]:
    """What a model answers on the site's own test sets, by the prefix of its scores: of all but GLOBAL."""
    run, local = work.run, _context(work, status)
    if work.scored is ScoredModel.GLOBAL_LOCALLY:
        run.method.load_global(local, base)
        return on_local_test(run.model, run.data, GLOBAL, local.check)
    # Of OWN, too: the method may replace the head, and the weights need the right one.
    run.method.load_global(local, with_own_buffers(base, local))
    if run.method.declares.personal != "loaded" and (personal := work.state.personal) is not None:
        load(run.model.body, personal[Part.BODY])
        load(run.model.head, personal[Part.HEAD])
    return of_personal(run.model, run.data, run.recipe, local.check)


def _context(work: Computation, status: DaemonStatus) -> FitContext:
    return work.run.fit_context(work.site, work.task, work.state, status, NoCheckpoints())


def within_bounds(payload: Payload, base: Payload, rules: Federation) -> Payload:
    """The update, moved as far from `base` as the recipe lets a site move it, in the same direction.

    The norm is the server's without secure aggregation: of (payload - base), or of the tensor itself where the base
    has none. What says who counts, and not how far, stays as it is.

    Args:
        base: the model that the fit started from.
    """
    moving = {part: tensors for part, tensors in payload.items() if part not in NOT_A_MOVE}
    most = min(rules.max_update_norm, relative_bound(distance_norm(base, {}), rules.max_relative_norm))
    norm = distance_norm(moving, base)
    if not norm > most:  # NaN is refused by the policy, by name
        return payload
    scaled = {
        part: {name: _towards(base.get(part, {}).get(name), array, most / norm) for name, array in tensors.items()}
        for part, tensors in moving.items()
    }
    return {**payload, **scaled}


def _towards(origin: Array | None, array: Array, share: float) -> Array:
    """This share of the way from the origin; integer tensors as they are."""
    if array.dtype.kind != "f":
        return array
    start = origin.astype(np.float64) if origin is not None and origin.shape == array.shape else 0.0
    return np.asarray(start + share * (array.astype(np.float64) - start), dtype=array.dtype)


@dataclass
class UnitLayer:
    """One call of a rectifier in the body.

    Attributes:
        units: C, channels of a convolution or outputs of a linear layer.
        rows: tensors [C, ...], by part and name, that make these units.
        columns: tensors [O, C * n, ...] that read them.
    """

    units: int
    rows: list[tuple[Part, str]]
    columns: list[tuple[Part, str]] = field(default_factory=list)


def withhold_rare_units(
    payload: Payload,
    base: Payload,
    model: SplitModel,
    data: SiteData,
    fewest: int,
    first: Payload | None = None,
    trained: Payload | None = None,
    check: Callable[[], None] = lambda: None,
) -> Payload:
    """The update, in which units that are active for fewer than `fewest` training images are as received.

    A unit counts as rare if it is so in the first model, or if it is in a trained one without being dead there.

    Args:
        payload: an update; one without a body is returned as it is.
        base: the update's tensors as the fit started from them.
        model: as the fit left it; it is so again afterwards.
        first: what the fit computed with at first; None: `base`.
        trained: the model that the update is made of; None: nobody knows, so `model` counts, and what is sent as well.
        check: called before each batch of images.

    Raises:
        PolicyRefusedError: a tensor that reads a rare unit was not received: there is nothing to put in its place.
    """
    if fewest <= 1 or Part.BODY not in payload or not len(data.train):
        return payload
    layers = unit_layers(model, data)
    weights = {name: tensor.clone() for name, tensor in model.body.state_dict().items()}
    try:
        before, *after = (
            _active_in(body, model, data, layers, check)
            for body in ((first or base)[Part.BODY], *_trained_bodies(payload, model, trained))
        )
    finally:
        model.body.load_state_dict(weights)
    withheld = payload
    for place, layer in enumerate(layers):
        rare = before[place] < fewest
        for counts in after:
            rare |= (counts[place] > 0) & (counts[place] < fewest)
        if rare.any():
            withheld = _as_received(withheld, base, layer, rare)
    return withheld


def _trained_bodies(payload: Payload, model: SplitModel, trained: Payload | None) -> list[Tensors]:
    """The bodies in which a unit may be rare after a fit that left `model`."""
    if trained is not None:
        return [trained[Part.BODY]]
    body, update_body = dump(model.body), payload[Part.BODY]
    sent = {
        name: update_body[name] if name in update_body and update_body[name].shape == own.shape else own
        for name, own in body.items()
    }
    return [body] if all(np.array_equal(sent[name], own) for name, own in body.items()) else [body, sent]


def _active_in(
    body: Tensors, model: SplitModel, data: SiteData, layers: Sequence[UnitLayer], check: Callable[[], None]
) -> list[Array]:
    load(model.body, body)
    return active_images(model, data, layers, check)


def unit_layers(model: SplitModel, data: SiteData) -> list[UnitLayer]:
    """The rectifiers of the body in the order of their calls, found by passing one image through it."""
    trace = _Trace()
    image, _ = next(iter(data.ordered(data.train, 1)))
    with _observed(model.body, trace.record):
        trace.finish(model.body(image), model.head)
    return trace.layers


def active_images(
    model: SplitModel, data: SiteData, layers: Sequence[UnitLayer], check: Callable[[], None] = lambda: None
) -> list[Array]:
    """For each layer the number of training images, [C] int64, for which a unit is active at any place.

    Args:
        check: called before each batch of images.
    """
    counts = [torch.zeros(layer.units, dtype=torch.int64) for layer in layers]
    calls: list[Tensor] = []

    def count(_name: str, module: nn.Module, _input: Tensor, output: Tensor) -> None:
        if isinstance(module, RECTIFIERS):
            calls.append((output.flatten(2) > 0).any(2).sum(0) if output.ndim > 2 else (output > 0).sum(0))

    with _observed(model.body, count):
        for images, _ in data.ordered(data.train, BATCH):
            check()
            calls.clear()
            model.body(images)
            for total, active in zip(counts, calls, strict=True):
                total += active.cpu()
    return [total.numpy() for total in counts]


class _Trace:
    """Follows one image: which tensors make each rectifier's units, and which read them."""

    def __init__(self) -> None:
        self.layers: list[UnitLayer] = []
        self._since: list[tuple[str, nn.Module]] = []  # modules with parameters since the last rectifier
        self._reads: dict[int, UnitLayer] = {}  # address of an activation -> the rectifier that made it
        self._alive: list[Tensor] = []  # so that no address is used twice

    def record(self, name: str, module: nn.Module, input_: Tensor, output: Tensor) -> None:
        """A module of the body without submodules was called."""
        self._alive += [input_, output]
        source = self._reads.get(input_.data_ptr())
        if isinstance(module, RECTIFIERS):
            self._add(output.shape[1])
            self._reads[output.data_ptr()] = self.layers[-1]
        elif weight := _weight(module):
            self._since.append((name, module))
            if source is not None and weight[1:] and weight[1] % source.units == 0:
                source.columns.append((Part.BODY, _path(name, "weight")))
        elif source is not None:  # pooling, flattening, dropout: the units are still told apart
            self._reads[output.data_ptr()] = source

    def finish(self, features: Tensor, head: nn.Module) -> None:
        """The head reads what the body gave."""
        source, weight = self._reads.get(features.data_ptr()), _weight(head)
        if source is not None and weight[1:] and weight[1] % source.units == 0:
            source.columns.append((Part.HEAD, "weight"))

    def _add(self, units: int) -> None:
        # All of them: after a residual sum, both branches' last layers, and their normalisations, make the units.
        rows = [
            (Part.BODY, _path(name, parameter))
            for name, module in self._since
            for parameter, tensor in module.named_parameters(recurse=False)
            if tensor.shape[:1] == (units,)
        ]
        self.layers.append(UnitLayer(units, rows))
        self._since = []


def _path(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter


def _weight(module: nn.Module) -> tuple[int, ...]:
    """Shape of a module's own weight; empty: it has none."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return () if weight is None else tuple(weight.shape)


@contextmanager
def _observed(body: nn.Module, call: Observer) -> Iterator[None]:
    """In evaluation mode and without gradients, `call` is told of every call of a module without submodules."""
    modes = [(module, module.training) for module in body.modules()]
    hooks = [
        module.register_forward_hook(lambda module, inputs, output, name=name: call(name, module, inputs[0], output))
        for name, module in body.named_modules()
        if not any(True for _ in module.children())
    ]
    body.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training


def _as_received(payload: Payload, base: Payload, layer: UnitLayer, rare: Array) -> Payload:
    """The payload with rare units' rows and columns of `base`; `rare` is [C] bool."""
    parts = {part: dict(tensors) for part, tensors in payload.items()}
    for by_row, tensors in ((True, layer.rows), (False, layer.columns)):
        controls = [(Part.CONTROL, f"{part}.{name}") for part, name in tensors]  # their mean steps tell the same
        for part, name in (*tensors, *controls):
            if name not in parts.get(part, {}):
                continue  # the method does not send it
            own, received = parts[part][name], base.get(part, {}).get(name)
            if received is None or received.shape != own.shape:
                raise PolicyRefusedError(
                    "min_images_per_unit",
                    f"{part}/{name} reads units that few images activate, and the server did not send this tensor. "
                    "So no received values can replace what it learnt from these images (min_images_per_unit)",
                    f"{part}/{name}",
                )
            parts[part][name] = _mixed(own, received, rare, by_row=by_row)
    return parts


def _mixed(own: Array, received: Array, rare: Array, *, by_row: bool) -> Array:
    mixed = np.array(own, order="C")
    units = (len(rare), -1) if by_row else (len(own), len(rare), -1)
    view = mixed.reshape(units)  # a view: the copy is contiguous
    where = rare if by_row else (slice(None), rare)
    view[where] = received.reshape(units)[where]
    return mixed
