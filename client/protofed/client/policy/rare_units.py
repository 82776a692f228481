"""Rule `min_images_per_unit`: what a unit learnt from very few images does not leave.

A unit with a ReLU gets a gradient only from the images for which it is active. If that is a single image, its row moves
by this image times a number. Such a unit's rows, and the weights of the next layer that read it, leave as received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from protofed.client.data.site_data import SiteData
from protofed.client.models.split import SplitModel, dump, load
from protofed.client.policy.update_checks import PolicyRefusedError
from protofed.common.payload import Array, Part, Payload, Tensors

RECTIFIERS = (nn.ReLU, nn.ReLU6)  # as modules: a plug-in that calls functions instead is not seen
BATCH = 512  # images at a time, as in evaluation
Observer = Callable[[str, nn.Module, Tensor, Tensor], None]  # name, module, its input and its output


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
    left = {name: tensor.clone() for name, tensor in model.body.state_dict().items()}
    try:
        before, *after = (
            _active_in(body, model, data, layers, check)
            for body in ((first or base)[Part.BODY], *_trained_bodies(payload, model, trained))
        )
    finally:
        model.body.load_state_dict(left)
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
    left, named = dump(model.body), payload[Part.BODY]
    sent = {
        name: named[name] if name in named and named[name].shape == own.shape else own for name, own in left.items()
    }
    return [left] if all(np.array_equal(sent[name], own) for name, own in left.items()) else [left, sent]


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
                    f"{part}/{name} reads units that few images activate, and was not received: nothing can take the "
                    "place of what it learnt from them (min_images_per_unit)",
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
