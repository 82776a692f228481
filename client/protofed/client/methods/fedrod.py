"""FedROD: Chen and Chao, ICLR 2022, Algorithm 1, with linear personal heads (METHODS §5.8)."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar

import torch

from protofed.client.method import (
    ONE_CLASS,
    Declaration,
    FitContext,
    Part,
    Payload,
    SumForm,
    Update,
    Weighting,
    balanced_softmax,
    client_methods,
    dump,
    frozen,
    load,
    supervised,
    train,
)


@client_methods.register("fedrod")
@dataclass(frozen=True)
class FedRODClient:
    """A generic head G for all classes alike, which is sent; a head P of the site's own for what it differs by."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset({"balanced-softmax"}),  # of the generic head
        tasks=ONE_CLASS,
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD})

    weighting: Weighting = "uniform"  # of body and G: 1/K, or n_k/n from sites that disclose n_k

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the generic predictor: body and G."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Body and G by the balanced softmax, eq. (3); then P by the cross-entropy of G f + P f, eq. (6)."""
        self.load_global(local, received)
        body, generic = local.model.body, local.model.head
        frequencies = local.data.label_frequencies()  # [C]
        trained = train(local, lambda x, y: balanced_softmax(local.model(x), y, frequencies))
        sent = {Part.BODY: dump(body), Part.HEAD: dump(generic)}
        own = deepcopy(generic)
        load(
            own,
            local.client_state.get(Part.HEAD)
            or {name: torch.zeros(a.shape).numpy() for name, a in sent[Part.HEAD].items()},
        )
        with frozen(local.model):
            train(local, lambda x, y: supervised(local, generic(z := body(x)) + own(z), y), own.parameters())
        local.client_state[Part.HEAD] = dump(own)
        # Both are linear in the features, so the site's prediction G f + P f is that of one head.
        load(generic, {name: sent[Part.HEAD][name] + array for name, array in local.client_state[Part.HEAD].items()})
        return local.update(sent, loss=trained.loss)

    def sum_form(self) -> SumForm:
        """Body and G."""
        return SumForm((Part.BODY, Part.HEAD), self.weighting)
