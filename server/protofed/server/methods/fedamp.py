"""FedAMP: Huang et al., AAAI 2021, Algorithm 1, server side (METHODS §5.15)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from protofed.server.method import (
    ExpectedUpdate,
    Mean,
    Method,
    Part,
    Payload,
    RoundContext,
    SiteId,
    Update,
    like,
    server_methods,
)
from protofed.server.methods.mixtures import MODEL, row
from protofed.server.methods.site_rows import distance, index_rows, pick_model, with_newest


@server_methods.register(Method("fedamp", "FedAMP", "Huang et al., AAAI 2021", client_options=("lam",)))
@dataclass(frozen=True)
class FedAMPServer:
    """u_k = (1 - sum_j xi_kj) w_k + sum_j xi_kj w_j over the newest models of all other sites.

    xi_kj = alpha A'(||w_k - w_j||^2) with A(x) = 1 - exp(-x / sigma): sites with like models draw each other closer.
    """

    global_model: ClassVar[bool] = False
    sigma: Annotated[float, Field(gt=0)] = 0.1  # the scale of squared distances: grows with the model
    alpha: Annotated[float, Field(gt=0)] = 1000.0  # alpha_k, the step on A

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """Every site's first model."""
        return model

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """u_k, made now: O(S P) a site. Where xi would add up to more than 1 they add up to 1: u_k stays a mean."""
        own, models = pick_model(state, site), state.get(Part.PRIVATE, {})
        weights = {
            number: self._weight(own, row(models, number)) for s, number in index_rows(state).items() if s != site
        }
        if not any(weights.values()):
            return own
        most, mean = max(sum(weights.values()), 1.0), Mean(MODEL)
        mean.add(own, 1 - sum(weights.values()) / most)
        for number, weight in weights.items():
            if weight:
                mean.add(row(models, number), weight / most)
        return mean.result()

    def expects(self, state: Payload) -> ExpectedUpdate:
        """The whole model."""
        return ExpectedUpdate(like(state, *MODEL))

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """w_k of the round's sites; of all others the last one stays."""
        return with_newest(state, updates)

    def _weight(self, own: Payload, other: Payload) -> float:
        return self.alpha / self.sigma * math.exp(-(distance(own, other) ** 2) / self.sigma)
