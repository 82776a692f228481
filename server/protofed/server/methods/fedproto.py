"""FedProto: Tan et al., AAAI 2022, Algorithm 1, server side (METHODS §5.9)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from protofed.server.method import (
    ONE_CLASS,
    ClassRows,
    ContributorMeans,
    ExpectedUpdate,
    Method,
    Part,
    Payload,
    RoundContext,
    SiteId,
    SumForm,
    Sums,
    Update,
    prototype_rows,
    server_methods,
)


@server_methods.register(
    Method(
        "fedproto",
        "FedProto",
        "Tan et al., AAAI 2022",
        client_options=("lam", "min_samples_per_class"),
        tasks=ONE_CLASS,
    )
)
@dataclass(frozen=True)
class FedProtoServer:
    """C_j <- mean of the class means of the sites that hold class j: eq. (6) as released, without |D_ij| / N_j."""

    global_model: ClassVar[bool] = False

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """The model that every site begins with, and no prototypes yet."""
        return model

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """The prototypes, and the first model for sites that come new."""
        return state

    def expects(self, state: Payload) -> ExpectedUpdate:
        """A class mean [D] for each class that the site holds."""
        return ExpectedUpdate((), prototype_rows(state[Part.HEAD]["weight"]))

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """A class that nobody holds keeps its prototype."""
        means = ContributorMeans()
        for update in updates:
            means.add(update.payload.get(Part.PROTOTYPES, {}))
        return {**state, Part.PROTOTYPES: {**state.get(Part.PROTOTYPES, {}), **means.result()}}

    def sum_form(self) -> SumForm:
        """Class means."""
        return SumForm((), rows=ClassRows(Part.PROTOTYPES, (Part.HEAD, "weight")))

    def from_sums(self, state: Payload, sums: Sums, context: RoundContext) -> Payload:
        """As `aggregate`."""
        return {**state, Part.PROTOTYPES: {**state.get(Part.PROTOTYPES, {}), **sums.row_means()}}
