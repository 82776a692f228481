"""Ditto: Li et al., ICML 2021, Algorithm 1 (METHODS §5.10)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

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
    load,
    proximal,
    supervised,
    train,
)


@client_methods.register("ditto")
@dataclass(frozen=True)
class DittoClient:
    """FedAvg's global model w, and beside it a model v_k of the site's own that is drawn towards w and never leaves."""

    declares: ClassVar[Declaration] = Declaration(
        personal="loaded",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD})

    lam: Annotated[float, Field(ge=0)] = 0.75  # lambda: 0 trains v_k alone
    reference: Literal["received", "trained"] = "received"  # of v_k: w^t as in the paper, or w_k as FedNH's code has it
    weighting: Weighting = "uniform"  # p_k of w: 1/K, or n_k/n from sites that disclose n_k

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load v_k; before the site's first fit, and where nothing is remembered, the global model."""
        own = local.client_state if Part.BODY in local.client_state else received
        load(local.model.body, own[Part.BODY])
        load(local.model.head, own[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """w_k <- SGD(w^t), which is sent; v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w^t)), which is kept."""
        model = local.model
        load(model.body, received[Part.BODY])
        load(model.head, received[Part.HEAD])
        anchor = _copies(model.parameters())
        trained = train(local, lambda x, y: supervised(local, model(x), y))  # first: v_k takes no random number of w's
        sent = local.sent_model = {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}
        if self.reference == "trained":
            anchor = _copies(model.parameters())
        self.load_global(local, received)
        train(local, lambda x, y: supervised(local, model(x), y) + self.lam * proximal(model.parameters(), anchor))
        local.client_state.update({Part.BODY: dump(model.body), Part.HEAD: dump(model.head)})
        return local.update(sent, loss=trained.loss)

    def sum_form(self) -> SumForm:
        """The whole global model."""
        return SumForm((Part.BODY, Part.HEAD), self.weighting)


def _copies(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]
