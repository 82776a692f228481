"""FedPHP: Li, Zhan et al., ECML-PKDD 2021, with their released code's schedule (METHODS §5.13)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from protofed.client.method import (
    ONE_CLASS,
    Declaration,
    FitContext,
    Part,
    Payload,
    SumForm,
    Update,
    Weighting,
    client_methods,
    dump,
    held,
    load,
    mean_discrepancy,
    soft_labels,
    supervised,
    train,
)


@client_methods.register("fedphp")
@dataclass(frozen=True)
class FedPHPClient:
    """FedAvg whose sites keep h, a moving average of the models that they trained: it teaches, and it predicts."""

    declares: ClassVar[Declaration] = Declaration(
        personal="loaded",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks=ONE_CLASS,
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD})

    transfer: Literal["kd", "mmd"] = "kd"  # R: h's soft labels, or the distribution of its features
    lam: Annotated[float, Field(ge=0, le=1)] = 0.1  # lambda: R's share of the loss
    temperature: Annotated[float, Field(gt=0)] = 4.0  # T of h's soft labels
    inheritance: Annotated[float, Field(ge=0, lt=1)] = 0.9  # mu of a site that took part as often as is expected
    weighting: Weighting = "uniform"  # p_k: 1/K, or n_k/n from sites that disclose n_k

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load h; before the site's first fit, the global model."""
        own = local.client_state if Part.BODY in local.client_state else received
        load(local.model.body, own[Part.BODY])
        load(local.model.head, own[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """w_k <- SGD of (1 - lambda) CE + lambda R(w, h), which is sent; h <- mu h + (1 - mu) w_k, which is kept."""
        body, head = local.model.body, local.model.head
        load(body, received[Part.BODY])
        load(head, received[Part.HEAD])
        h = {part: local.client_state.get(part, received[part]) for part in (Part.BODY, Part.HEAD)}
        embed, classify = held(body, h[Part.BODY]), held(head, h[Part.HEAD])

        def objective(images: Tensor, labels: Tensor) -> Tensor:  # [B, channels, H, W], [B] -> []
            logits, inherited = head(z := body(images)), embed(images)
            if self.transfer == "kd":
                apart = soft_labels(logits, classify(inherited), self.temperature)
            else:
                apart = mean_discrepancy(z, inherited)
            return (1 - self.lam) * supervised(local, logits, labels) + self.lam * apart

        trained = train(local, objective)
        sent = {Part.BODY: dump(body), Part.HEAD: dump(head)}
        fits = int(local.client_state.get(Part.PRIVATE, {}).get("fits", 0))
        expected = max(int(local.participation * local.rounds), 1)
        mu = self.inheritance * min(fits / expected, 1)
        for part, tensors in sent.items():
            history = {name: np.asarray(mu * h[part][name] + (1 - mu) * w, w.dtype) for name, w in tensors.items()}
            local.client_state[part] = history
        local.client_state[Part.PRIVATE] = {"fits": np.array(fits + 1)}
        return local.update(sent, loss=trained.loss)

    def sum_form(self) -> SumForm:
        """The whole model."""
        return SumForm((Part.BODY, Part.HEAD), self.weighting)
