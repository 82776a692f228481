"""FedProx: Li et al., MLSys 2020, Algorithm 2, client side: what an author makes of the generated client half."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from protofed.client.method import Declaration, FitContext, Part, Payload, Update, dump, load, supervised, train


@dataclass(frozen=True)
class OurproxClient:
    """SGD on h(w) = F_k(w) + mu/2 ||w - w^t||^2."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD})

    mu: Annotated[float, Field(ge=0)] = 0.1  # of the proximal term

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Make local.model the global model."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Train from the global model, near to it."""
        self.load_global(local, received)
        start = [parameter.detach().clone() for parameter in local.model.parameters()]

        def objective(images: Tensor, labels: Tensor) -> Tensor:
            drift = [(now - then).square().sum() for now, then in zip(local.model.parameters(), start, strict=True)]
            return supervised(local, local.model(images), labels) + self.mu / 2 * torch.stack(drift).sum()

        trained = train(local, objective)
        return local.update({Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}, loss=trained.loss)
