"""FedNH: Dai et al., AAAI 2023, Algorithm 1, server side (METHODS §1, count-free as in §1.8 a)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import Field

from protofed.server.method import (
    ONE_CLASS,
    Array,
    ClassRows,
    ConfigError,
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
    unit,
)
from protofed.server.methods.maximal_separation import maxsep, orthogonal

Means: TypeAlias = Literal["uniform", "similarity", "literal"]


@server_methods.register(
    Method(
        "fednh", "FedNH", "Dai et al., AAAI 2023", client_options=("means", "min_samples_per_class"), tasks=ONE_CLASS
    )
)
@dataclass(frozen=True)
class FedNHServer:
    """Body: uniform mean. Prototypes: W_c <- unit(rho W_c + (1 - rho) unit(sum_k alpha_kc mu_kc)), contributors k."""

    global_model: ClassVar[bool] = True
    prototype_momentum: Annotated[float, Field(ge=0, le=1)] = 0.9  # rho: share of the old prototypes kept
    prototype_init: Literal["maxsep", "orthogonal"] = "maxsep"  # first prototypes: exact eq. (1), or what Table 1 used
    prototype_seed: int | None = None  # of the first prototypes' random rotation; None: the run's seed
    scale: Annotated[float, Field(gt=0)] = 20.0  # s, the first logit scale; from 1, as released, early rounds are lost
    fixed_scale: bool = False  # s is trained and averaged with the body unless fixed
    prototypes: Means = (
        "uniform"  # alpha: 1, or exp(<W_c, mu_kc>); "literal": raw means, not made unit before smoothing
    )

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """Well-separated prototypes [C, D] take the place of the head."""
        weight = model[Part.HEAD]["weight"]
        first = maxsep if self.prototype_init == "maxsep" else orthogonal
        seed = context.seed if self.prototype_seed is None else self.prototype_seed
        rng = np.random.default_rng(seed % 2**64)  # NumPy takes no negative seed
        mean = first(context.classes, weight.shape[1], rng).astype(weight.dtype)
        scale = np.asarray(self.scale, dtype=weight.dtype)
        return {Part.BODY: model[Part.BODY], Part.HEAD: {"scale": scale}, Part.PROTOTYPES: {"mean": mean}}

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """Body, scale and prototypes."""
        return state

    def expects(self, state: Payload) -> ExpectedUpdate:
        """Body and scale; a unit class mean [D] for each class that the site holds."""
        return ExpectedUpdate(like(state, *self._averaged), prototype_rows(state[Part.PROTOTYPES]["mean"]))

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """Eq. (3) and the smoothing of Algorithm 1; a class that nobody holds keeps its prototype."""
        old = state[Part.PROTOTYPES]["mean"]
        mean, rows = Mean(self._averaged), ContributorMeans()
        for update in updates:
            mean.add(update.payload)
            means = update.payload.get(Part.PROTOTYPES, {})
            rows.add({name: self._weighted(row, old[int(name)]) for name, row in means.items()})
        return {**state, **mean.result(), Part.PROTOTYPES: {"mean": self._smoothed(old, rows.result())}}

    def sum_form(self) -> SumForm:
        """Body, scale, and class means, which sites send as unit vectors but with `prototypes = "literal"`."""
        if self.prototypes == "similarity":
            raise ConfigError(
                'FedNH with prototypes = "similarity" weighs each class mean by its own similarity, which no sum does: '
                'set prototypes = "uniform", or remove federation.secure'
            )
        return SumForm(self._averaged, rows=ClassRows(Part.PROTOTYPES, (Part.PROTOTYPES, "mean")))

    def from_sums(self, state: Payload, sums: Sums, context: RoundContext) -> Payload:
        """As `aggregate`."""
        new = self._smoothed(state[Part.PROTOTYPES]["mean"], sums.row_means())
        return {**state, **sums.averaged(state), Part.PROTOTYPES: {"mean": new}}

    def _smoothed(self, old: Array, rows: dict[str, Array]) -> Array:
        new = old.copy()
        for name, row in rows.items():
            towards = row if self.prototypes == "literal" else unit(row)
            new[int(name)] = unit(self.prototype_momentum * old[int(name)] + (1 - self.prototype_momentum) * towards)
        return new

    def _weighted(self, row: Array, prototype: Array) -> Array:
        if self.prototypes == "literal":
            return row
        direction = unit(row)
        return direction * np.exp(prototype @ direction) if self.prototypes == "similarity" else direction

    @property
    def _averaged(self) -> tuple[Part, ...]:
        return (Part.BODY,) if self.fixed_scale else (Part.BODY, Part.HEAD)
