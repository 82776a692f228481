"""IFCA: Ghosh et al., NeurIPS 2020, Algorithm 1 with model averaging, server side (METHODS §5.19)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from protofed.server.method import (
    ExpectedUpdate,
    Mean,
    Method,
    Part,
    Payload,
    RoundContext,
    SiteId,
    TensorSpec,
    Update,
    like,
    server_methods,
)
from protofed.server.methods.mixtures import MODEL, row, stacked


@server_methods.register(Method("ifca", "IFCA", "Ghosh et al., NeurIPS 2020"))
@dataclass(frozen=True)
class IFCAServer:
    """k models; each is the mean of what the sites sent that chose it, and stays where nobody did."""

    global_model: ClassVar[bool] = False
    clusters: Annotated[int, Field(ge=1)] = 2  # k

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """theta_1 as it was made, the others with the entries of each of its tensors in an order of their own.

        The paper draws all of them alike: a permutation keeps each layer's distribution, and needs no PyTorch here.
        """
        others = [_shuffled(model, np.random.default_rng([context.seed, j])) for j in range(1, self.clusters)]
        return self._state([model, *others])

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """All k models."""
        return state

    def start(self, state: Payload, site: SiteId, update: Payload) -> Payload:
        """The model that the site chose."""
        return self._models(state)[_choice(update)]

    def expects(self, state: Payload) -> ExpectedUpdate:
        """The whole model, and which one it is, [k]."""
        dtype = state[Part.HEAD]["weight"].dtype.name
        return ExpectedUpdate((*like(state, *MODEL), TensorSpec(Part.CHOICE, "one-hot", dtype, (self.clusters,))))

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """theta_j <- mean of theta_k over the sites with j_k = j, not weighted."""
        means: dict[int, Mean] = {}
        for update in updates:
            means.setdefault(_choice(update.payload), Mean(MODEL)).add(update.payload)
        old = self._models(state)
        return self._state([means[j].result() if j in means else old[j] for j in range(self.clusters)])

    def _state(self, models: list[Payload]) -> Payload:
        first, *others = models
        return {**first, Part.SITE_MODELS: stacked(others, MODEL)} if others else first

    def _models(self, state: Payload) -> list[Payload]:
        first = {part: state[part] for part in MODEL}
        return [first, *(row(state[Part.SITE_MODELS], j) for j in range(self.clusters - 1))]


def _choice(update: Payload) -> int:
    return int(np.argmax(update[Part.CHOICE]["one-hot"]))


def _shuffled(model: Payload, draw: np.random.Generator) -> Payload:
    return {
        part: {name: draw.permutation(a.reshape(-1)).reshape(a.shape) for name, a in sorted(model[part].items())}
        for part in MODEL
    }
