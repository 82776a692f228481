"""IFCA: Ghosh et al., NeurIPS 2020, Algorithm 1 with model averaging, client side (METHODS §5.19)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from protofed.client.method import (
    Declaration,
    Exchange,
    FitContext,
    FitStart,
    Part,
    Payload,
    Update,
    client_methods,
    compute_losses,
    dump,
    load,
    site_models,
    supervised,
    train,
)


@client_methods.register(ifca=("clusters",))
@dataclass(frozen=True)
class IFCAClient:
    """Each site trains the best suited of k models, and says which."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=False,
        mixes_classes=False,
        exchanges=frozenset(Exchange),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD, Part.CHOICE})

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the model with the least loss on the site's examples; without examples, the first."""
        models = _models(received)
        model = models[_best(local, models)]
        load(local.model.body, model[Part.BODY])
        load(local.model.head, model[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """j_k = argmin_j F_k(theta_j); theta_j_k is trained, and sent with the one-hot [k] of j_k."""
        models = _models(received)
        choice = _best(local, models)
        local.start = FitStart(models[choice])
        load(local.model.body, models[choice][Part.BODY])
        load(local.model.head, models[choice][Part.HEAD])
        trained = train(local, lambda x, y: supervised(local, local.model(x), y))
        sent = {Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}
        one_hot = np.eye(len(models), dtype=sent[Part.HEAD]["weight"].dtype)[choice]
        return local.update({**sent, Part.CHOICE: {"one-hot": one_hot}}, loss=trained.loss)


def _models(received: Payload) -> list[Payload]:
    """theta_1, which a site would be sent alone, and the others."""
    return [received, *site_models(received)]


def _best(local: FitContext, models: list[Payload]) -> int:
    if len(models) == 1 or not len(local.data.train):
        return 0
    return int(np.argmin(compute_losses(local, models, local.data.train)))
