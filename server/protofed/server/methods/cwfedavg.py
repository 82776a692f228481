"""cwFedAVG: Lee and Choi, arXiv 2406.07800v1, server side (METHODS §3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from protofed.server.method import (
    ExpectedUpdate,
    Mean,
    Part,
    Payload,
    SiteId,
    TensorSpec,
    Update,
    Weighting,
    describe,
    server_methods,
    weight_of,
)
from protofed.server.methods.mixtures import FACTORS, distribution, mixed, row, stacked


@server_methods.register(cwfedavg=("wdr",))
@dataclass(frozen=True)
class CwFedAvgServer:
    """Class models w_j^G = sum_i q_ij w_i^L; what site i is sent: w_i = sum_j p_ij w_j^G."""

    global_model: ClassVar[bool] = False
    layers: Literal["all", "head"] = "all"  # class-wise; with "head" the body is FedAvg's (the authors' version 2)
    weighting: Weighting = "uniform"  # p_i: 1/M, or n_i/n from sites that disclose n_i
    shares: Literal["norms", "true"] = "norms"  # p_ij: p~ of the head's norms, or true ones (simulations only)

    def init(self, model: Payload, classes: int) -> Payload:
        """Every class model is the first model: one row."""
        models = {**stacked([model], self._parts), FACTORS: np.ones((classes, 1))}
        return {**self._common(model), Part.CLASS_MODELS: models}

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """The site's mixture by its last shares; before its first update, or if they say nothing, all classes alike."""
        q = state[Part.CLASS_MODELS][FACTORS]
        last = state.get(Part.CLASS_SHARES, {}).get(site, np.zeros(len(q)))
        shares = last if last.any() else np.full(len(q), 1 / len(q))
        return {**self._common(state), **mixed(state[Part.CLASS_MODELS], shares @ q)}

    def class_model(self, state: Payload, c: int) -> Payload:
        """w_c^G, made now."""
        models = state[Part.CLASS_MODELS]
        return {**self._common(state), **mixed(models, models[FACTORS][c])}

    def expects(self, state: Payload) -> ExpectedUpdate:
        """The whole model, and shares [C]."""
        model = {**self._common(state), **row(state[Part.CLASS_MODELS], 0)}
        classes, dtype = len(state[Part.CLASS_MODELS][FACTORS]), model[Part.HEAD]["weight"].dtype.name
        shares = TensorSpec(self._shares_part, "shares", dtype, (classes,))
        return ExpectedUpdate((*describe(model), shares), weight=self.weighting == "examples")

    def aggregate(self, state: Payload, updates: Iterable[Update]) -> Payload:
        """q_ij = p_i p_ij / sum_i p_i p_ij over the round's sites; a class without mass keeps its model, as a row."""
        models: list[Payload] = []
        common, shares, mass = Mean(self._common(state)), {}, []
        for update in updates:
            weight = weight_of(update, self.weighting)
            common.add(update.payload, weight)
            shares[update.site] = distribution(update.payload[self._shares_part]["shares"])
            mass.append(weight * shares[update.site])
            models.append(update.payload)
        q = np.stack(mass, axis=1)  # [C, sites of the round]
        kept = np.flatnonzero(q.sum(axis=1) <= 0)
        q = np.pad(q, ((0, 0), (0, len(kept))))
        q[kept, len(models) + np.arange(len(kept))] = 1.0
        rows = stacked([*models, *(self.class_model(state, int(c)) for c in kept)], self._parts)
        all_shares = {**state.get(Part.CLASS_SHARES, {}), **shares}
        factors = {FACTORS: q / q.sum(axis=1, keepdims=True)}
        return {**common.result(), Part.CLASS_MODELS: {**rows, **factors}, Part.CLASS_SHARES: all_shares}

    def _common(self, payload: Payload) -> Payload:
        return {Part.BODY: payload[Part.BODY]} if self.layers == "head" else {}

    @property
    def _parts(self) -> tuple[Part, ...]:
        return (Part.HEAD,) if self.layers == "head" else (Part.BODY, Part.HEAD)

    @property
    def _shares_part(self) -> Part:
        return Part.CLASS_SHARES if self.shares == "norms" else Part.LABEL_DISTRIBUTION
