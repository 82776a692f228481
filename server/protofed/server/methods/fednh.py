"""FedNH: Dai et al., AAAI 2023, Algorithm 1, server side (METHODS §1, count-free as in §1.8 a)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from protofed.common.payload import Part, Payload, SiteId, Update
from protofed.common.tensors import HolderMeans, Mean, unit
from protofed.server.method import Expected, like, prototype_rows, server_methods
from protofed.server.separation import maxsep, orthogonal


@server_methods.register("fednh")
@dataclass(frozen=True)
class FedNH:
    """Body: uniform mean. Prototypes: W_c <- unit(rho W_c + (1 - rho) unit(sum over holders of unit(mu_kc)))."""

    global_model: ClassVar[bool] = True
    smoothing: Annotated[float, Field(ge=0, le=1)] = 0.9  # rho: share of the old prototypes kept
    separation: Literal["maxsep", "orthogonal"] = "maxsep"  # first prototypes: exact eq. (1), or what Table 1 used
    prototype_seed: int = 0  # of the first prototypes' random rotation
    scale: Annotated[float, Field(gt=0)] = 1.0  # s, the first logit scale
    fixed_scale: bool = False  # s is trained and averaged with the body unless fixed

    def init(self, model: Payload, classes: int) -> Payload:
        """Well-separated prototypes [C, D] take the place of the head."""
        weight = model[Part.HEAD]["weight"]
        first = maxsep if self.separation == "maxsep" else orthogonal
        mean = first(classes, weight.shape[1], np.random.default_rng(self.prototype_seed)).astype(weight.dtype)
        scale = np.asarray(self.scale, dtype=weight.dtype)
        return {Part.BODY: model[Part.BODY], Part.HEAD: {"scale": scale}, Part.PROTOTYPES: {"mean": mean}}

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """Body, scale and prototypes."""
        return state

    def expects(self, state: Payload) -> Expected:
        """Body and scale; a unit class mean [D] for each class that the site holds."""
        return Expected(like(state, *self._averaged), prototype_rows(state[Part.PROTOTYPES]["mean"]))

    def aggregate(self, state: Payload, updates: Iterable[Update]) -> Payload:
        """Eq. (3) and the smoothing of Algorithm 1; a class that nobody holds keeps its prototype."""
        mean, sums, new = Mean(self._averaged), HolderMeans(), state[Part.PROTOTYPES]["mean"].copy()
        for update in updates:
            mean.add(update.payload)
            sums.add({name: unit(row) for name, row in update.payload.get(Part.PROTOTYPES, {}).items()})
        for name, row in sums.result().items():
            new[int(name)] = unit(self.smoothing * new[int(name)] + (1 - self.smoothing) * unit(row))
        return {**state, **mean.result(), Part.PROTOTYPES: {"mean": new}}

    @property
    def _averaged(self) -> tuple[Part, ...]:
        return (Part.BODY,) if self.fixed_scale else (Part.BODY, Part.HEAD)
