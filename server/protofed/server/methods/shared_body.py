"""One body of all sites: what the servers of FedPer, FedRep and FedBABU do (METHODS §5.5, §5.6, §5.7)."""

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
    Update,
    Weighting,
    like,
    server_methods,
    weighted_mean,
)


@server_methods.register(
    Method("fedper", "FedPer", "Arivazhagan et al., 2019"),
    Method("fedrep", "FedRep", "Collins et al., ICML 2021", client_options=("head_epochs",)),
)
@dataclass(frozen=True)
class SharedBodyServer:
    """Body <- sum_k p_k body_k over the round's sites; heads stay at the sites: there is no model of all."""

    global_model: ClassVar[bool] = False
    weighting: Weighting = "uniform"  # p_k: 1/K, or n_k/n from sites that disclose n_k

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """The model as it was made. Its head is where every site's own begins."""
        return model

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """The body, and the first head for sites that come new."""
        return state

    def expects(self, state: Payload) -> ExpectedUpdate:
        """The body."""
        return ExpectedUpdate(like(state, Part.BODY), weight=self.weighting == "examples")

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """The (weighted) mean of the sites' bodies."""
        return {**state, **weighted_mean(updates, (Part.BODY,), self.weighting)}

    def sum_form(self) -> SumForm:
        """The body."""
        return SumForm((Part.BODY,), self.weighting)

    def from_sums(self, state: Payload, sums: Sums, context: RoundContext) -> Payload:
        """As `aggregate`."""
        return {**state, **sums.averaged(state)}


@server_methods.register(Method("fedbabu", "FedBABU", "Oh et al., ICLR 2022", client_options=("finetune_epochs",)))
@dataclass(frozen=True)
class FedBABUServer(SharedBodyServer):
    """Body <- sum_k p_k body_k; all sites train theirs for the one first head, so both together are a global model."""

    global_model: ClassVar[bool] = True
