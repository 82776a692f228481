"""cwFedAVG with mixing on the sites: Lee and Choi, arXiv 2406.07800v1, client side (METHODS §3.7 b), last layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from protofed.client.method import (
    ONE_CLASS,
    Declaration,
    FitContext,
    Part,
    Payload,
    SumForm,
    Update,
    client_methods,
    dump,
    load,
    supervised,
    train,
)


@client_methods.register("cwfedavg-private")
@dataclass(frozen=True)
class CwFedAvgPrivateClient:
    """Train the plain mean, as in FedAvg; the site's own model mixes the class heads by its true shares and stays.

    The mixture is never trained. Otherwise what is sent would start where the site's distribution put it, and a server
    that chose the class heads could read the distribution. No WDR is needed.
    """

    declares: ClassVar[Declaration] = Declaration(
        personal="loaded",
        global_model=False,
        mixes_classes=True,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks=ONE_CLASS,
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD, Part.CLASS_PRESENCE})

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the mean body and the head sum_j p_j head_j of the class heads [C, ...], p [C] the site's shares."""
        p = local.data.label_frequencies().cpu().numpy()  # [C]
        load(local.model.body, received[Part.BODY])
        heads = received[Part.CLASS_MODELS].items()
        load(local.model.head, {name: np.tensordot(p.astype(stack.dtype), stack, 1) for name, stack in heads})

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Minimise the cross-entropy from the mean body and head, as in FedAvg."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])
        trained = train(local, lambda x, y: supervised(local, local.model(x), y))
        present = (local.data.label_frequencies() > 0).to(next(local.model.head.parameters()))
        model = {Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}
        return local.update({**model, Part.CLASS_PRESENCE: {"present": present.cpu().numpy()}}, loss=trained.loss)

    def sum_form(self) -> SumForm:
        """The whole model, and for each class the heads of the sites that have it."""
        return SumForm((Part.BODY, Part.HEAD), mixtures=(Part.HEAD,), shares=Part.CLASS_PRESENCE)
