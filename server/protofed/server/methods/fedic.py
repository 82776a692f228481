"""FEDIC: Shang et al., ICME 2022, server side; the distillation is the evaluator's (METHODS §5.14)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from protofed.server.method import (
    ONE_CLASS,
    Array,
    ExpectedUpdate,
    Mean,
    Method,
    Part,
    Payload,
    RoundContext,
    SiteId,
    Update,
    Weighting,
    like,
    server_methods,
    weigh,
)

OF_CLIENT = ("steps", "refine_lr", "refine_decay", "distilled", "temperature")


@server_methods.register(Method("fedic", "FEDIC", "Shang et al., ICME 2022", client_options=OF_CLIENT, tasks=ONE_CLASS))
@dataclass(frozen=True)
class FEDICServer:
    """w <- the evaluator's distillation of the sites' models into their mean sum_k p_k w_k."""

    global_model: ClassVar[bool] = True
    weighting: Weighting = "uniform"  # p_k: 1/K, or n_k/n from sites that disclose n_k

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """The model as it was made."""
        return model

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """The global model."""
        return state

    def expects(self, state: Payload) -> ExpectedUpdate:
        """The whole model."""
        return ExpectedUpdate(like(state, Part.BODY, Part.HEAD), weight=self.weighting == "examples")

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """The mean of the sites' models, and as `body.weight`, … [K, ...] these themselves, in site order."""
        mean, models = Mean((Part.BODY, Part.HEAD)), dict[str, list[Array]]()
        for update in updates:
            mean.add(update.payload, weigh(update, self.weighting))
            for part in (Part.BODY, Part.HEAD):
                for name, array in update.payload[part].items():
                    models.setdefault(f"{part}.{name}", []).append(array)
        return {**mean.result(), Part.SITE_MODELS: {path: np.stack(rows) for path, rows in models.items()}}

    def to_refine(self, state: Payload) -> Payload:
        """All of it."""
        return state

    def expects_refined(self, state: Payload) -> ExpectedUpdate:
        """A model of the mean's shapes."""
        return ExpectedUpdate(like(state, Part.BODY, Part.HEAD))

    def refined(self, state: Payload, update: Update, context: RoundContext) -> Payload:
        """The evaluator's model, without the sites'."""
        return dict(update.payload)
