"""CFL: Sattler, Müller and Samek, IEEE TNNLS 2020, Algorithm 3, client side (METHODS §5.18)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from protofed.client.method import (
    Declaration,
    Exchange,
    FitContext,
    Part,
    Payload,
    Update,
    client_methods,
    dump,
    load,
    supervised,
    train,
)


@client_methods.register(cfl=("eps1", "eps2", "first_rounds", "linkage"))
@dataclass(frozen=True)
class CFLClient:
    """FedAvg from the model of the site's cluster; the site need not know which one that is."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=False,
        mixes_classes=False,
        exchanges=frozenset(Exchange),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD})

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the cluster's model."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Train the cluster's model; the server takes dW_k of it."""
        self.load_global(local, received)
        model = local.model
        trained = train(local, lambda x, y: supervised(local, model(x), y))
        return local.update({Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}, loss=trained.loss)
