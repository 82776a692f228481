"""Solo: every site trains alone; what federation is compared with (METHODS §5.20)."""

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
    Update,
    client_methods,
    dump,
    load,
    supervised,
    train,
)


@client_methods.register("solo")
@dataclass(frozen=True)
class SoloClient:
    """E epochs of SGD on the cross-entropy, from where the site stopped the last time."""

    declares: ClassVar[Declaration] = Declaration(
        personal="loaded",
        global_model=False,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset()

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the site's own model; before its first fit, the run's initial one."""
        model = local.client_state if Part.BODY in local.client_state else received
        load(local.model.body, model[Part.BODY])
        load(local.model.head, model[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Train the site's model further, keep it in memory, send nothing but the loss."""
        self.load_global(local, received)
        trained = train(local, lambda x, y: supervised(local, local.model(x), y))
        local.client_state.update({Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)})
        return local.update({}, loss=trained.loss)

    def dp_cost(self, plan: Plan) -> DpCost:
        """One training."""
        return DpCost((plan.epochs,))
