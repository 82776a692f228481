"""MOON: Li, He and Song, CVPR 2021, Algorithm 1 (METHODS §5.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

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
    held,
    load,
    model_contrast,
    supervised,
    train,
)


@client_methods.register("moon")
@dataclass(frozen=True)
class MOONClient:
    """Features are drawn to those of the global model, away from those of the site's last one: l_sup + mu l_con."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD})

    mu: Annotated[float, Field(ge=0)] = 1.0  # of eq. (4): 0 is FedAvg
    temperature: Annotated[float, Field(gt=0)] = 0.5  # tau of eq. (3)
    weighting: Weighting = "uniform"  # p_k: 1/K, or n_k/n from sites that disclose n_k

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the global model."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Minimise l_sup + mu l_con, eq. (4); a site that has no last model yet minimises l_sup."""
        self.load_global(local, received)
        body, head = local.model.body, local.model.head
        anchor = held(body, received[Part.BODY])
        previous = [held(body, local.client_state[Part.BODY])] if Part.BODY in local.client_state and self.mu else []

        def objective(images: Tensor, labels: Tensor) -> Tensor:  # [B, channels, H, W], [B] -> []
            loss = supervised(local, head(z := body(images)), labels)
            for last in previous:
                loss = loss + self.mu * model_contrast(z, anchor(images), last(images), self.temperature)
            return loss

        trained = train(local, objective)
        local.client_state[Part.BODY] = dump(body)
        return local.update({Part.BODY: dump(body), Part.HEAD: dump(head)}, loss=trained.loss)

    def sum_form(self) -> SumForm:
        """The whole model."""
        return SumForm((Part.BODY, Part.HEAD), self.weighting)
