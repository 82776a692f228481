"""FedFomo: Zhang et al., ICLR 2021, Algorithm 1, client side (METHODS §5.16)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from protofed.client.method import (
    Array,
    Declaration,
    Exchange,
    FitContext,
    FitStart,
    Part,
    Payload,
    Update,
    client_methods,
    compute_losses,
    distance,
    dump,
    load,
    mixed,
    site_models,
    supervised,
    train,
)

NEAR = 1e-5  # added to distances: an equal model gets the weight 0, as it gains nothing


@client_methods.register(fedfomo=("exploration", "exploration_decay"))
@dataclass(frozen=True)
class FedFomoClient:
    """Each site weighs other sites' models by what they gain on its own validation part, and trains their mixture."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=False,
        mixes_classes=False,
        exchanges=frozenset(Exchange),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD, Part.CHOICE})

    models: Annotated[int, Field(ge=1)] = 4  # M: other sites' models that a site is sent
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.2  # share of each class that the site does not train on

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the site's own model, as it sent it last."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Weigh, mix and train; the weights go to the server, which keeps them as affinities."""
        local.data, validation = local.data.held_out(self.validation)
        models = site_models(received)[: self.models]
        gains = np.zeros(len(models))
        if models and len(validation):
            own, *losses = compute_losses(local, [received, *models], validation)
            gains = first_order(own, losses, [distance(local, received, other) for other in models])
        start = mixed([received, *models], normalised_gains(gains))
        local.start = FitStart(start)
        self.load_global(local, start)
        trained = train(local, lambda x, y: supervised(local, local.model(x), y))
        sent = {Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}
        weights = np.zeros(self.models, sent[Part.HEAD]["weight"].dtype)
        weights[: len(models)] = gains
        return local.update({**sent, Part.CHOICE: {"weights": weights}}, loss=trained.loss)


def first_order(own: float, losses: Sequence[float], distances: Sequence[float]) -> Array:
    """[M], w_kj = (L_k(w_k) - L_k(w_j)) / ||w_j - w_k||: the slope of the loss towards w_j."""
    return (own - np.asarray(losses)) / (np.asarray(distances) + NEAR)


def normalised_gains(gains: Array) -> Array:
    """[1 + M], of the own model and the others: max(w_kj, 0), adding up to 1; the own one, if none gains anything."""
    positive = np.maximum(gains, 0.0)
    total = positive.sum()
    return np.concatenate([[0.0], positive / total]) if total > 0 else np.eye(1 + len(gains))[0]
