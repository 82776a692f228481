"""FedNova: Wang et al., NeurIPS 2020, Section 5, client side (METHODS §5.23)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from protofed.client.method import (
    Declaration,
    FitContext,
    Part,
    Payload,
    SumForm,
    Update,
    Weighting,
    client_methods,
    dump,
    load,
    proximal,
    sgd_length,
    supervised,
    towards,
    train,
)


@client_methods.register("fednova")
@dataclass(frozen=True)
class FedNovaClient:
    """FedAvg whose sites send what one step of theirs does in the mean, and how many they took."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD, Part.STEPS})

    mu: Annotated[float, Field(ge=0)] = 0.0  # of FedProx's term in the site's loss; 0: none
    weighting: Weighting = "uniform"  # p_k: 1/K, or n_k/n from sites that disclose n_k

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the global model."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """SGD leads from x to y; x - d_k with d_k = (x - y) / ||a_k||_1 is sent, and ||a_k||_1."""
        self.load_global(local, received)
        model, plan = local.model, local.plan
        anchor = [parameter.detach().clone() for parameter in model.parameters()]
        trained = train(
            local, lambda x, y: supervised(local, model(x), y) + self.mu * proximal(model.parameters(), anchor)
        )
        sgd = plan.optimizer == "sgd"  # Adam's steps are about as long as its learning rate, whatever the gradients
        length = sgd_length(trained.steps, plan.momentum, local.lr * self.mu) if sgd else float(trained.steps)
        y = {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}
        sent = towards(received, y, 1 / length, y)
        return local.update({**sent, Part.STEPS: {"steps": np.array(length, np.float32)}}, loss=trained.loss)

    def sum_form(self) -> SumForm:
        """The whole model, and the steps."""
        return SumForm((Part.BODY, Part.HEAD, Part.STEPS), self.weighting)
