"""FedFomo: Zhang et al., ICLR 2021, Algorithm 1, server side (METHODS §5.16)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from protofed.server.method import (
    Array,
    ExpectedUpdate,
    Mean,
    Method,
    Part,
    Payload,
    RoundContext,
    SiteId,
    TensorSpec,
    Update,
    like,
    server_methods,
)
from protofed.server.methods.mixtures import MODEL, row, stacked
from protofed.server.methods.site_rows import index_rows, pick_model, with_newest

_AFFINITY, _SENT = "affinity.", "sent."  # in part PRIVATE: of a site [A, 2], row and sum; and its next rows [M]


@server_methods.register(Method("fedfomo", "FedFomo", "Zhang et al., ICLR 2021", client_options=("validation",)))
@dataclass(frozen=True)
class FedFomoServer:
    """Sends each site its own model and the M others that have gained it most so far, or now and then one by chance."""

    global_model: ClassVar[bool] = False
    models: Annotated[int, Field(ge=1)] = 4  # M
    exploration: Annotated[float, Field(ge=0, le=1)] = 0.3  # epsilon: chance that one of the M is any other site's
    exploration_decay: Annotated[float, Field(ge=0, le=1)] = 0.05  # by which epsilon falls in each round

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """Every site's first model."""
        return model

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """w_k, and M others without a name. A site that comes new gets the first model, and the oldest M."""
        own, sent = pick_model(state, site), self._sent(state, site)
        if not sent:
            return own
        others = [row(state[Part.PRIVATE], number) for number in sent]
        return {**own, Part.SITE_MODELS: stacked(others, MODEL)}

    def start(self, state: Payload, site: SiteId, update: Payload) -> Payload:
        """The mixture that the site began with, by the weights that it says."""
        sent, mean = self._sent(state, site), Mean(MODEL)
        gains = np.maximum(update[Part.CHOICE]["weights"][: len(sent)].astype(float), 0)
        if not gains.any() or not np.isfinite(gains).all():
            return pick_model(state, site)
        for number, share in zip(sent, gains / gains.max(), strict=True):
            if share:
                mean.add(row(state[Part.PRIVATE], number), share)
        return mean.result()

    def expects(self, state: Payload) -> ExpectedUpdate:
        """The whole model, and a weight for each model that was sent, [M]; zeros after them."""
        dtype = state[Part.HEAD]["weight"].dtype.name
        return ExpectedUpdate((*like(state, *MODEL), TensorSpec(Part.CHOICE, "weights", dtype, (self.models,))))

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """w_k of the round's sites; P_kj <- P_kj + w_kj of the weights as they are, so that what harms is sent last."""
        received, private = list(updates), state.get(Part.PRIVATE, {})
        new = with_newest(state, received)
        rows, carried = index_rows(new), dict(new[Part.PRIVATE])
        affinities = {site: {int(n): float(p) for n, p in private.get(f"{_AFFINITY}{site}", ())} for site in rows}
        for update in received:
            of_site, weights = affinities[update.site], update.payload[Part.CHOICE]["weights"].astype(float)
            for number, weight in zip(self._sent(state, update.site), weights, strict=False):
                of_site[number] = of_site.get(number, 0.0) + weight
        for site, of_site in affinities.items():
            if len(rows) > 1:
                carried[f"{_SENT}{site}"] = self._next(rows[site], len(rows), of_site, context)
            if of_site:
                carried[f"{_AFFINITY}{site}"] = np.array(sorted(of_site.items()))
        return {**new, Part.PRIVATE: carried}

    def _sent(self, state: Payload, site: SiteId) -> list[int]:
        """The rows that a site is sent of this state."""
        rows = index_rows(state)
        oldest = [] if site in rows else list(rows.values())[: self.models]
        return [int(number) for number in state.get(Part.PRIVATE, {}).get(f"{_SENT}{site}", oldest)]

    def _next(self, own: int, count: int, affinity: dict[int, float], context: RoundContext) -> Array:
        """Up to M rows: each the next by affinity, or with probability epsilon the next in a random order."""
        draw = np.random.default_rng([context.seed, context.round, own])
        by_chance = draw.permutation([number for number in range(count) if number != own]).tolist()
        best = sorted(by_chance, key=lambda number: -affinity.get(number, 0.0))
        epsilon, chosen = self.exploration - self.exploration_decay * context.round, list[int]()
        for _ in range(min(self.models, len(best))):
            order = by_chance if draw.random() < epsilon else best
            chosen.append(next(number for number in order if number not in chosen))
        return np.array(chosen, np.int64)
