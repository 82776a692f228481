"""cwFedAVG: Lee and Choi, arXiv 2406.07800v1, server side (METHODS §3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from protofed.server.method import (
    ONE_CLASS,
    ConfigError,
    ExpectedUpdate,
    Mean,
    Method,
    Part,
    Payload,
    RoundContext,
    SiteId,
    SumForm,
    Sums,
    TensorSpec,
    Update,
    Weighting,
    describe,
    server_methods,
    weigh,
)
from protofed.server.methods.mixtures import FACTORS, distribution, mixed, row, stacked


@server_methods.register(
    Method("cwfedavg", "cwFedAVG", "Lee and Choi, arXiv 2406.07800v1", client_options=("wdr",), tasks=ONE_CLASS)
)
@dataclass(frozen=True)
class CwFedAvgServer:
    """Class models w_j^G = sum_i q_ij w_i^L; what site i is sent: w_i = sum_j p_ij w_j^G.

    Under secure aggregation the server knows neither w_i^L nor p_ij: it has sum_i p_i p_ij w_i^L and sum_i p_i p_ij. It
    sends all class models to all sites. Each site makes its own w_i from them.
    """

    global_model: ClassVar[bool] = False
    layers: Literal["all", "head"] = "all"  # class-wise; with "head" the body is FedAvg's (the authors' version 2)
    weighting: Weighting = "uniform"  # p_i: 1/M, or n_i/n from sites that disclose n_i
    shares: Literal["norms", "true"] = (
        "norms"  # p_ij: p~ of the head's norms, or true ones (simulations, secure aggregation)
    )

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """Every class model is the first model: one row."""
        models = {**stacked([model], self._parts), FACTORS: np.ones((context.classes, 1))}
        return {**self._common(model), Part.CLASS_MODELS: models}

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """The site's mixture by its last shares; before its first update, or if they say nothing, all classes alike.

        Class models that were made of sums are sent to all as they are: each site mixes them by its own shares.
        """
        if self._is_of_sums(state):
            return state
        q = state[Part.CLASS_MODELS][FACTORS]
        last = state.get(Part.CLASS_SHARES, {}).get(site, np.zeros(len(q)))
        shares = last if last.any() else np.full(len(q), 1 / len(q))
        return {**self._common(state), **mixed(state[Part.CLASS_MODELS], shares @ q)}

    def joined(self, state: Payload, update: Update) -> Payload:
        """Add a newcomer's shares, from which its mixture is made. From sums each site makes its own mixture."""
        if self._is_of_sums(state):
            return state
        shares = distribution(update.payload[self._shares_part]["shares"])
        return {**state, Part.CLASS_SHARES: {**state.get(Part.CLASS_SHARES, {}), update.site: shares}}

    def class_model(self, state: Payload, c: int) -> Payload:
        """w_c^G, the model of class c, made when it is asked for."""
        models = state[Part.CLASS_MODELS]
        return {**self._common(state), **mixed(models, models[FACTORS][c])}

    def expects(self, state: Payload) -> ExpectedUpdate:
        """The whole model, and shares [C]."""
        model = {**self._common(state), **row(state[Part.CLASS_MODELS], 0)}
        classes, dtype = len(state[Part.CLASS_MODELS][FACTORS]), model[Part.HEAD]["weight"].dtype.name
        shares = TensorSpec(self._shares_part, "shares", dtype, (classes,))
        return ExpectedUpdate((*describe(model), shares), weight=self.weighting == "examples")

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """q_ij = p_i p_ij / sum_i p_i p_ij over the round's sites; a class without mass keeps its model, as a row."""
        models: list[Payload] = []
        common, shares, mass = Mean(self._common(state)), {}, []
        for update in updates:
            weight = weigh(update, self.weighting)
            common.add(update.payload, weight)
            shares[update.site] = distribution(update.payload[self._shares_part]["shares"])
            mass.append(weight * shares[update.site])
            models.append(update.payload)
        q = np.stack(mass, axis=1)  # [C, sites of the round]
        unlearnt = np.flatnonzero(q.sum(axis=1) <= 0)
        q = np.pad(q, ((0, 0), (0, len(unlearnt))))
        q[unlearnt, len(models) + np.arange(len(unlearnt))] = 1.0
        rows = stacked([*models, *(self.class_model(state, int(c)) for c in unlearnt)], self._parts)
        all_shares = {**state.get(Part.CLASS_SHARES, {}), **shares}
        factors = {FACTORS: q / q.sum(axis=1, keepdims=True)}
        return {**common.result(), Part.CLASS_MODELS: {**rows, **factors}, Part.CLASS_SHARES: all_shares}

    def sum_form(self) -> SumForm:
        """The model by class, with the sites' true shares; with `layers = "head"` the head by class, and the body."""
        if self.shares != "true":
            raise ConfigError(
                'cwfedavg with shares = "norms" sends the server an estimate of each site\'s class distribution. With '
                'federation.secure = true set shares = "true": the true distribution is then only in the encrypted sum'
            )
        common = (Part.BODY,) if self.layers == "head" else ()
        return SumForm(common, self.weighting, mixtures=self._parts, shares=Part.LABEL_DISTRIBUTION)

    def from_sums(self, state: Payload, sums: Sums, context: RoundContext) -> Payload:
        """As `aggregate`, but with the C class models themselves as the rows, in place of the sites' models."""
        classes, mass = len(state[Part.CLASS_MODELS][FACTORS]), sums.mixture_mass()
        models = stacked([self.class_model(state, c) for c in range(classes)], self._parts)
        for part in self._parts:
            for name, mixture in sums.mixtures(part).items():
                has_mass = (mass > 0).reshape(-1, *(1,) * (mixture.ndim - 1))
                models[f"{part}.{name}"] = np.where(has_mass, mixture, models[f"{part}.{name}"])
        return {**sums.averaged(state), Part.CLASS_MODELS: {**models, FACTORS: np.eye(classes)}}

    def _is_of_sums(self, state: Payload) -> bool:
        """Whether the state is one of `from_sums`: several models, and no site's shares."""
        return Part.CLASS_SHARES not in state and state[Part.CLASS_MODELS][FACTORS].shape[1] > 1

    def _common(self, payload: Payload) -> Payload:
        return {Part.BODY: payload[Part.BODY]} if self.layers == "head" else {}

    @property
    def _parts(self) -> tuple[Part, ...]:
        return (Part.HEAD,) if self.layers == "head" else (Part.BODY, Part.HEAD)

    @property
    def _shares_part(self) -> Part:
        return Part.CLASS_SHARES if self.shares == "norms" else Part.LABEL_DISTRIBUTION
