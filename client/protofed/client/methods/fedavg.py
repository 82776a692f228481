"""FedAvg: McMahan et al., AISTATS 2017, Algorithm 1, ClientUpdate (METHODS §5.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
    supervised,
    train,
)


@client_methods.register(
    "fedavg",
    fedavgm=("server_lr", "momentum"),
    fedadam=("server_lr", "beta1", "beta2", "tau"),
    fedyogi=("server_lr", "beta1", "beta2", "tau"),
)
@dataclass(frozen=True)
class FedAvgClient:
    """E epochs of SGD on the cross-entropy, from the global model."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD})

    weighting: Weighting = "uniform"  # p_k: 1/K, or n_k/n from sites that disclose n_k

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the global model."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """w_k <- SGD(w), the inner loop of ClientUpdate."""
        self.load_global(local, received)
        trained = train(local, lambda x, y: supervised(local, local.model(x), y))
        return local.update({Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}, loss=trained.loss)

    def dp_cost(self, plan: Plan) -> DpCost:
        """One training."""
        return DpCost((plan.epochs,), linear=True)

    def sum_form(self) -> SumForm:
        """The whole model."""
        return SumForm((Part.BODY, Part.HEAD), self.weighting)
