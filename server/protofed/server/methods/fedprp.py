"""FedPRP: Guo et al., IEEE TNNLS 2024, server side (METHODS §2.3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

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
    like,
    prototype_rows,
    server_methods,
)

OF_CLIENT = (
    "head_epochs",
    "intra",
    "inter",
    "temperature",
    "distance",
    "margins",
    "prediction",
    "compat",
    "min_samples_per_class",
)


@server_methods.register(
    Method("fedprp", "FedPRP", "Guo et al., TNNLS 2024", client_options=OF_CLIENT, tasks=ONE_CLASS)
)
@dataclass(frozen=True)
class FedPRPServer:
    """Body: uniform mean, eq. (5). Prototypes: P_c <- beta * mean over contributors + (1 - beta) P_c, eq. (8)."""

    global_model: ClassVar[bool] = True
    prototype_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5  # 1 - beta: share of the old; a new class has none

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """The model as it was made, and no prototypes yet. Its head is where every private head begins."""
        return model

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """Body, prototypes, and the first head, for sites that come new."""
        return state

    def expects(self, state: Payload) -> ExpectedUpdate:
        """The body; a class mean [D] for each class that the site holds."""
        return ExpectedUpdate(like(state, Part.BODY), prototype_rows(state[Part.HEAD]["weight"]))

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """A class that nobody holds keeps its prototype: the server remembers."""
        body, means = Mean((Part.BODY,)), ContributorMeans()
        for update in updates:
            body.add(update.payload)
            means.add(update.payload.get(Part.PROTOTYPES, {}))
        return {**state, **body.result(), Part.PROTOTYPES: self._prototypes(state, means.result())}

    def sum_form(self) -> SumForm:
        """The body, and class means."""
        return SumForm((Part.BODY,), rows=ClassRows(Part.PROTOTYPES, (Part.HEAD, "weight")))

    def from_sums(self, state: Payload, sums: Sums, context: RoundContext) -> Payload:
        """As `aggregate`."""
        return {**state, **sums.averaged(state), Part.PROTOTYPES: self._prototypes(state, sums.row_means())}

    def _prototypes(self, state: Payload, means: dict[str, Array]) -> dict[str, Array]:
        old = state.get(Part.PROTOTYPES, {})
        return {**old, **{name: self._moved(old.get(name), mean) for name, mean in means.items()}}

    def _moved(self, old: Array | None, mean: Array) -> Array:
        momentum = self.prototype_momentum
        return mean if old is None else np.asarray((1 - momentum) * mean + momentum * old, dtype=mean.dtype)
