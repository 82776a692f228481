"""cwFedAVG with mixing on the sites: Lee and Choi, arXiv 2406.07800v1, server side (METHODS §3.7 b), last layer"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from protofed.server.method import (
    ONE_CLASS,
    Array,
    ContributorMeans,
    ExpectedUpdate,
    Mean,
    Method,
    Part,
    Payload,
    RoundContext,
    SiteId,
    SumForm,
    Sums,
    TensorSpec,
    Update,
    describe,
    server_methods,
)


@server_methods.register(
    Method(
        "cwfedavg-private", "cwFedAVG, mixed by the sites", "after Lee and Choi, arXiv 2406.07800v1", tasks=ONE_CLASS
    )
)
@dataclass(frozen=True)
class CwFedAvgPrivateServer:
    """Body and head: FedAvg, for training. Class heads: the mean of the heads of the sites that have the class.

    Every site gets body, head and all class heads, and mixes the class heads itself, for its own predictions. A site
    tells which classes it has, never how much of each: p_ij would need a secure aggregation, so contributors count
    alike.
    """

    global_model: ClassVar[bool] = False

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """Every class head is the first head."""
        heads = {name: np.stack([array] * context.classes) for name, array in model[Part.HEAD].items()}
        return {Part.BODY: model[Part.BODY], Part.HEAD: model[Part.HEAD], Part.CLASS_MODELS: heads}

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """Mean body and head, and all class heads."""
        return state

    def class_model(self, state: Payload, c: int) -> Payload:
        """The body with one class's head."""
        heads = {name: stack[c] for name, stack in state[Part.CLASS_MODELS].items()}
        return {Part.BODY: state[Part.BODY], Part.HEAD: heads}

    def expects(self, state: Payload) -> ExpectedUpdate:
        """The whole model, and which of the C classes the site has."""
        weight = state[Part.CLASS_MODELS]["weight"]
        present = TensorSpec(Part.CLASS_PRESENCE, "present", weight.dtype.name, weight.shape[:1])
        return ExpectedUpdate((*describe(self.class_model(state, 0)), present))

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """A class that nobody has keeps its head."""
        mean = Mean((Part.BODY, Part.HEAD))
        heads = {name: ContributorMeans() for name in state[Part.CLASS_MODELS]}
        for update in updates:
            mean.add(update.payload)
            present = np.flatnonzero(update.payload[Part.CLASS_PRESENCE]["present"] > 0)
            for name, means in heads.items():
                means.add(dict.fromkeys(map(str, present), update.payload[Part.HEAD][name]))
        new = {name: _replaced(state[Part.CLASS_MODELS][name], means.result()) for name, means in heads.items()}
        return {**mean.result(), Part.CLASS_MODELS: new}

    def sum_form(self) -> SumForm:
        """The whole model, and for each class the heads of the sites that have it."""
        return SumForm((Part.BODY, Part.HEAD), mixtures=(Part.HEAD,), shares=Part.CLASS_PRESENCE)

    def from_sums(self, state: Payload, sums: Sums, context: RoundContext) -> Payload:
        """As `aggregate`."""
        heads, present = sums.mixtures(Part.HEAD), np.flatnonzero(sums.mixture_mass() > 0)
        rows = {name: {str(c): heads[name][c] for c in present} for name in heads}
        new = {name: _replaced(stack, rows.get(name, {})) for name, stack in state[Part.CLASS_MODELS].items()}
        return {**sums.averaged(state), Part.CLASS_MODELS: new}


def _replaced(stack: Array, rows: dict[str, Array]) -> Array:
    """[C, ...] with the rows of the given classes."""
    return np.stack([rows.get(str(c), old) for c, old in enumerate(stack)])
