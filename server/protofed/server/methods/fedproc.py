"""FedProc: Mu et al., 2021 (Future Generation Computer Systems 143), server side (METHODS §4)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from protofed.server.method import (
    ONE_CLASS,
    Array,
    ClassRows,
    ContributorMeans,
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
    Weighting,
    like,
    prototype_rows,
    server_methods,
    weigh,
)


@server_methods.register(
    Method(
        "fedproc",
        "FedProc",
        "Mu et al., 2021",
        client_options=("gpc_from_start", "min_samples_per_class", "prototypes"),
        tasks=ONE_CLASS,
    )
)
@dataclass(frozen=True)
class FedProcServer:
    """w <- sum_k p_k w_k; c_j <- mean of the class means of the sites that hold class j."""

    global_model: ClassVar[bool] = True
    weighting: Weighting = "uniform"  # p_k: 1/K, or n_k/n from sites that disclose n_k

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """The model as it was made, and no prototypes yet."""
        return model

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """Model and prototypes."""
        return state

    def expects(self, state: Payload) -> ExpectedUpdate:
        """The whole model; a class mean [D] for each class that the site holds."""
        return ExpectedUpdate(
            like(state, Part.BODY, Part.HEAD),
            prototype_rows(state[Part.HEAD]["weight"]),
            weight=self.weighting == "examples",
        )

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """A class that nobody holds keeps its prototype."""
        mean, prototypes = Mean((Part.BODY, Part.HEAD)), ContributorMeans()
        for update in updates:
            mean.add(update.payload, weigh(update, self.weighting))
            prototypes.add(update.payload.get(Part.PROTOTYPES, {}))
        return {**mean.result(), Part.PROTOTYPES: _remembered(state, prototypes.result())}

    def sum_form(self) -> SumForm:
        """The whole model, and class means."""
        return SumForm((Part.BODY, Part.HEAD), self.weighting, ClassRows(Part.PROTOTYPES, (Part.HEAD, "weight")))

    def from_sums(self, state: Payload, sums: Sums, context: RoundContext) -> Payload:
        """As `aggregate`."""
        return {**sums.averaged(state), Part.PROTOTYPES: _remembered(state, sums.row_means())}


def _remembered(state: Payload, means: dict[str, Array]) -> dict[str, Array]:
    return {**state.get(Part.PROTOTYPES, {}), **means}
