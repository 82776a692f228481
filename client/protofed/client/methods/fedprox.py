"""FedProx: Li et al., MLSys 2020, Algorithm 2 (METHODS §5.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from protofed.client.method import (
    Declaration,
    DpCost,
    FitContext,
    Part,
    Payload,
    Plan,
    SumForm,
    Update,
    Weighting,
    client_methods,
    dump,
    load,
    proximal,
    supervised,
    train,
)


@client_methods.register("fedprox")
@dataclass(frozen=True)
class FedProxClient:
    """FedAvg whose sites are drawn back to the global model while they train: h_k(w; w^t), eq. (2)."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD})

    mu: Annotated[float, Field(ge=0)] = 0.01  # of eq. (2): 0 is FedAvg
    weighting: Weighting = "uniform"  # p_k: 1/K, or n_k/n from sites that disclose n_k

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the global model."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Minimise F_k(w) + mu/2 ||w - w^t||^2."""
        self.load_global(local, received)
        model = local.model
        anchor = [parameter.detach().clone() for parameter in model.parameters()]
        trained = train(
            local,
            lambda x, y: supervised(local, model(x), y),
            regularizer=lambda: self.mu * proximal(model.parameters(), anchor),
        )
        return local.update({Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}, loss=trained.loss)

    def dp_cost(self, plan: Plan) -> DpCost:
        """One training."""
        return DpCost((plan.epochs,), linear=True)

    def sum_form(self) -> SumForm:
        """The whole model."""
        return SumForm((Part.BODY, Part.HEAD), self.weighting)
