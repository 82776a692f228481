"""APPLE: Luo and Wu, IJCAI 2022, Algorithm 1, client side (METHODS §5.17)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from protofed.client.method import (
    Cores,
    Declaration,
    Exchange,
    FitContext,
    FitStart,
    ParameterGroup,
    Part,
    Payload,
    Update,
    client_methods,
    dump,
    supervised,
    train,
)

Schedule: TypeAlias = Literal["cosine", "exponential"]


@client_methods.register("apple")
@dataclass(frozen=True)
class APPLEClient:
    """A site's own model is sum_j p_kj w_j over all sites' core models; it trains its core w_k and the vector p_k."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=False,
        mixes_classes=False,
        exchanges=frozenset(Exchange),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD})

    p_lr: Annotated[float, Field(ge=0)] = 0.001  # eta_2, of p_k; the plan's is eta_1, of w_k
    mu: Annotated[float, Field(ge=0)] = 0.1  # how much p_k is drawn to p_0 at first
    until: Annotated[float, Field(gt=0, le=1)] = 0.2  # L: share of the rounds after which it is free
    schedule: Schedule = "cosine"  # of lambda(r)

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load sum_j p_kj w_j of the newest cores; where the site has none yet, the first model is its own."""
        cores = Cores.of(local, received)
        cores.load_own(local.model)
        cores.mix_into(local.model, cores.remembered(local))

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Minimise F_k(sum_j p_kj w_j) + lambda(r) mu ||p_k - p_0||^2 over w_k, which is sent, and p_k, which stays."""
        self.load_global(local, received)
        model, cores = local.model, Cores.of(local, received)
        local.start = FitStart({Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}, cores.core)
        cores.load_own(model)
        p, p_0 = cores.remembered(local).requires_grad_(), 1 / len(cores)
        pull = self.mu * decay(local.round - 1, self.until * local.rounds, self.schedule)

        def objective(images: Tensor, labels: Tensor) -> Tensor:  # [B, channels, H, W], [B] -> []
            logits = functional_call(model, cores.mixed(model, p), (images,))
            return supervised(local, logits, labels) + pull * (p - p_0).square().sum()

        group_of_p = ParameterGroup([p], lr=self.p_lr, weight_decay=0.0)
        trained = train(local, objective, [*model.parameters(), group_of_p])
        sent = {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}
        cores.remember(local, p)
        cores.mix_into(model, p)
        return local.update(sent, loss=trained.loss)


def decay(rounds: int, end: float, schedule: Schedule) -> float:
    """lambda(r) after `rounds` rounds: from 1 to 0 at L R."""
    if rounds >= end:
        return 0.0
    return (1 + math.cos(math.pi * rounds / end)) / 2 if schedule == "cosine" else 0.001 ** (rounds / end)
