"""FedAvg: McMahan et al., AISTATS 2017, Algorithm 1 (METHODS §5.1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from protofed.server.method import (
    ONE_CLASS,
    ExpectedUpdate,
    Method,
    Part,
    Payload,
    RoundContext,
    SiteId,
    SumForm,
    Sums,
    Update,
    Weighting,
    like,
    server_methods,
    weighted_mean,
)


@server_methods.register(
    Method("fedavg", "FedAvg", "McMahan et al., AISTATS 2017"),
    Method("apfl", "APFL", "Deng et al., arXiv 2003.13461", client_options=("alpha", "adapt", "alpha_decay")),
    Method("ditto", "Ditto", "Li et al., ICML 2021", client_options=("lam", "reference")),
    Method(
        "fedphp",
        "FedPHP",
        "Li et al., ECML-PKDD 2021",
        client_options=("transfer", "lam", "temperature", "inheritance"),
        tasks=ONE_CLASS,
    ),
    Method("fedprox", "FedProx", "Li et al., MLSys 2020", client_options=("mu",)),
    Method("fedrod", "FedROD", "Chen and Chao, ICLR 2022", tasks=ONE_CLASS),
    Method("moon", "MOON", "Li et al., CVPR 2021", client_options=("mu", "temperature")),
)
@dataclass(frozen=True)
class FedAvgServer:
    """w <- sum_k p_k w_k over the round's sites."""

    global_model: ClassVar[bool] = True
    weighting: Weighting = "uniform"  # p_k: 1/K, or n_k/n from sites that disclose n_k

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """The model as it was made."""
        return model

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """The global model."""
        return state

    def expects(self, state: Payload) -> ExpectedUpdate:
        """The whole model."""
        return ExpectedUpdate(like(state, Part.BODY, Part.HEAD), weight=self.weighting == "examples")

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """The (weighted) mean of the sites' models."""
        return weighted_mean(updates, (Part.BODY, Part.HEAD), self.weighting)

    def sum_form(self) -> SumForm:
        """The whole model."""
        return SumForm((Part.BODY, Part.HEAD), self.weighting)

    def from_sums(self, state: Payload, sums: Sums, context: RoundContext) -> Payload:
        """As `aggregate`."""
        return sums.averaged(state)
