"""FedBABU: Oh et al., ICLR 2022, Algorithm 1 (METHODS §5.7)."""

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


@client_methods.register("fedbabu")
@dataclass(frozen=True)
class FedBABUClient:
    """The head stays as it was drawn, the same at all sites; the body is trained for it. Sites fine-tune a copy."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY})

    finetune_epochs: Annotated[int, Field(ge=0)] = 5  # tau_f, of the site's own model; 0: it is the global one
    weighting: Weighting = "uniform"  # p_k: 1/K, or n_k/n from sites that disclose n_k

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the global body and the first head."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """ClientBodyUpdate; then the site's own model: the received model, trained as a whole for tau_f epochs."""
        model = local.model
        self.load_global(local, received)
        with frozen(model.head):
            trained = train(local, lambda x, y: supervised(local, model(x), y))
        sent = local.sent_model = {Part.BODY: dump(model.body)}
        self.load_global(local, received)
        train(local, lambda x, y: supervised(local, model(x), y), epochs=self.finetune_epochs)
        return local.update(sent, loss=trained.loss)

    def dp_cost(self, plan: Plan) -> DpCost:
        """The body, and the site's own model, which has noise, too."""
        return DpCost((plan.epochs, self.finetune_epochs))

    def sum_form(self) -> SumForm:
        """The body."""
        return SumForm((Part.BODY,), self.weighting)
