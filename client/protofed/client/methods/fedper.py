"""FedPer: Arivazhagan et al., 2019 (arXiv 1912.00818), Algorithm 1 (METHODS §5.5)."""

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


@client_methods.register("fedper")
@dataclass(frozen=True)
class FedPerClient:
    """Base layers W_B of all sites, a personalisation layer W_P of each: body and head are trained, the body leaves."""

    declares: ClassVar[Declaration] = Declaration(
        personal="loaded",
        global_model=False,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY})

    weighting: Weighting = "uniform"  # gamma_j: 1/K, or n_k/n from sites that disclose n_k

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the global body and the site's own head; before its first fit, the run's first head."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, local.client_state.get(Part.HEAD, received[Part.HEAD]))

    def fit(self, local: FitContext, received: Payload) -> Update:
        """(W_B, W_P) <- SGD; W_P stays."""
        self.load_global(local, received)
        trained = train(local, lambda x, y: supervised(local, local.model(x), y))
        local.client_state[Part.HEAD] = dump(local.model.head)
        return local.update({Part.BODY: dump(local.model.body)}, loss=trained.loss)

    def dp_cost(self, plan: Plan) -> DpCost:
        """One training."""
        return DpCost((plan.epochs,))

    def sum_form(self) -> SumForm:
        """The body."""
        return SumForm((Part.BODY,), self.weighting)
