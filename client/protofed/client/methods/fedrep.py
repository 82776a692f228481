"""FedRep: Collins et al., ICML 2021, Algorithm 1 (METHODS §5.6)."""

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
    frozen,
    load,
    supervised,
    train,
)


@client_methods.register("fedrep")
@dataclass(frozen=True)
class FedRepClient:
    """A representation phi of all sites, a head h_i of each: h_i is trained for phi first, and then phi for h_i."""

    declares: ClassVar[Declaration] = Declaration(
        personal="loaded",
        global_model=False,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY})

    head_epochs: Annotated[int, Field(ge=1)] = 10  # tau_h; the plan's epochs are the body's, tau_b
    weighting: Weighting = "uniform"  # of phi_i: 1/K, or n_k/n from sites that disclose n_k

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the global body and the site's own head; before its first fit, the run's first head."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, local.client_state.get(Part.HEAD, received[Part.HEAD]))

    def fit(self, local: FitContext, received: Payload) -> Update:
        """h_i <- GRD(f_i(h, phi^t)), tau_h times; then phi_i <- GRD(f_i(h_i, phi)), tau_b times, which is sent."""
        self.load_global(local, received)
        model = local.model
        with frozen(model.body):
            train(local, lambda x, y: supervised(local, model(x), y), epochs=self.head_epochs)
        with frozen(model.head):
            trained = train(local, lambda x, y: supervised(local, model(x), y))
        local.client_state[Part.HEAD] = dump(model.head)
        return local.update({Part.BODY: dump(model.body)}, loss=trained.loss)

    def dp_cost(self, plan: Plan) -> DpCost:
        """Head, then body: both make the body that is sent."""
        return DpCost((self.head_epochs, plan.epochs))

    def sum_form(self) -> SumForm:
        """The body."""
        return SumForm((Part.BODY,), self.weighting)
