"""SCAFFOLD: Karimireddy et al., ICML 2020, Algorithm 1, server side (METHODS §5.3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from protofed.server.method import (
    ExpectedUpdate,
    Mean,
    Method,
    Part,
    Payload,
    RoundContext,
    SiteId,
    SumForm,
    Sums,
    Update,
    like,
    server_methods,
    towards,
    weights,
)

MODEL = (Part.BODY, Part.HEAD)


@server_methods.register(Method("scaffold", "SCAFFOLD", "Karimireddy et al., ICML 2020"))
@dataclass(frozen=True)
class ScaffoldServer:
    """x <- x + eta_g mean(y_i - x); c <- c + |S|/N mean(c_i+ - c_i)."""

    global_model: ClassVar[bool] = True
    server_lr: Annotated[float, Field(gt=0)] = 1.0  # eta_g

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """The model as it was made, and c = 0."""
        return {**model, Part.CONTROL: {path: np.zeros_like(array) for path, array in weights(model).items()}}

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """The global model x, and c."""
        return state

    def expects(self, state: Payload) -> ExpectedUpdate:
        """The whole model, and a control variate for each of its weights."""
        return ExpectedUpdate(like(state, *MODEL, Part.CONTROL))

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """Uniform means, as in the paper."""
        mean, sites = Mean((*MODEL, Part.CONTROL)), 0
        for update in updates:
            mean.add(update.payload)
            sites += 1
        return self._stepped(state, mean.result(), sites / context.sites)

    def sum_form(self) -> SumForm:
        """The whole model, and the control variates."""
        return SumForm((*MODEL, Part.CONTROL))

    def from_sums(self, state: Payload, sums: Sums, context: RoundContext) -> Payload:
        """As `aggregate`."""
        return self._stepped(state, sums.averaged(state), sums.weight / context.sites)

    def _stepped(self, state: Payload, mean: Payload, share: float) -> Payload:
        # A site sends c + (c_i+ - c_i) as it sends x + (y_i - x): both leave as places, not as moves.
        model = towards(state, mean, self.server_lr, MODEL)
        return {**model, **towards(state, mean, share, (Part.CONTROL,))}
