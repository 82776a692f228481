"""FedNova: Wang et al., NeurIPS 2020, Section 5, server side (METHODS §5.23)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from protofed.server.method import (
    ExpectedUpdate,
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
    like,
    server_methods,
    towards,
    weighted_mean,
)

MODEL = (Part.BODY, Part.HEAD)
STEPS = TensorSpec(Part.STEPS, "steps", "float32", ())


@server_methods.register(Method("fednova", "FedNova", "Wang et al., NeurIPS 2020", client_options=("mu",)))
@dataclass(frozen=True)
class FedNovaServer:
    """x <- x - tau_eff sum_k p_k d_k: as far as the mean of the sites' steps, towards the mean of single ones."""

    global_model: ClassVar[bool] = True
    weighting: Weighting = "uniform"  # p_k: 1/K, or n_k/n from sites that disclose n_k

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """The model as it was made."""
        return model

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """The global model."""
        return state

    def expects(self, state: Payload) -> ExpectedUpdate:
        """The whole model, moved by one mean step of the site, x - d_k; and its length a_k in steps."""
        return ExpectedUpdate((*like(state, *MODEL), STEPS), weight=self.weighting == "examples")

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """tau_eff = sum_k p_k a_k is a mean, too."""
        mean = weighted_mean(updates, (*MODEL, Part.STEPS), self.weighting)
        return towards(state, mean, float(mean[Part.STEPS]["steps"]), MODEL)

    def sum_form(self) -> SumForm:
        """The whole model, and the steps."""
        return SumForm((*MODEL, Part.STEPS), self.weighting)

    def from_sums(self, state: Payload, sums: Sums, context: RoundContext) -> Payload:
        """As `aggregate`."""
        return towards(state, sums.averaged(state), float(sums.mean(Part.STEPS)["steps"]), MODEL)
