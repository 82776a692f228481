"""FedAMP: Huang et al., AAAI 2021, Algorithm 1, client side (METHODS §5.15)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

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
    proximal,
    supervised,
    train,
)


@client_methods.register(fedamp=("sigma",))
@dataclass(frozen=True)
class FedAMPClient:
    """Each site has a model of its own, and is drawn to u_k, the server's mixture of similar models."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=False,
        mixes_classes=False,
        exchanges=frozenset(Exchange),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD})

    alpha: Annotated[float, Field(gt=0)] = 1000.0  # alpha_k, the server's step
    lam: Annotated[float, Field(ge=0)] = 1.0  # lambda: how much being alike counts

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load u_k, where the site's own model begins in each round."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """w_k <- argmin F_k(w) + lambda / (2 alpha) ||w - u_k||^2, by the plan's steps from u_k."""
        self.load_global(local, received)
        model, pull = local.model, self.lam / self.alpha
        u = [parameter.detach().clone() for parameter in model.parameters()]
        trained = train(local, lambda x, y: supervised(local, model(x), y) + pull * proximal(model.parameters(), u))
        return local.update({Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}, loss=trained.loss)
