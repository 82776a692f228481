"""FedNH: Dai et al., AAAI 2023, Algorithm 1, client side (METHODS §1, count-free as in §1.8 a)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch.nn.functional import normalize

from protofed.client.method import (
    ONE_CLASS,
    ClassRows,
    ConfigError,
    CosineHead,
    Declaration,
    DpCost,
    FitContext,
    Part,
    Payload,
    Plan,
    SumForm,
    Update,
    Weigher,
    class_means,
    client_methods,
    dump,
    frequent,
    load,
    named,
    supervised,
    train,
)


@client_methods.register(fednh=("prototype_momentum", "prototype_init", "prototype_seed", "scale"))
@dataclass(frozen=True)
class FedNHClient:
    """Train the body against fixed prototypes, then send class means; classes that the site lacks are not sent."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks=ONE_CLASS,
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD, Part.PROTOTYPES})

    fixed_scale: bool = False  # s stays as received; else it is trained and sent as part of the head
    prototypes: Literal["uniform", "similarity", "literal"] = "uniform"  # sent as unit vectors; "literal": raw means
    means: Literal["plain", "confident"] = "plain"  # "confident": examples weighed by their class's probability
    min_samples_per_class: Annotated[int, Field(ge=1)] = 1  # images of a class, or its mean stays: see policies, too

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the global body, with logits s W unit(f(x)) by the received prototypes W [C, D], frozen."""
        load(local.model.body, received[Part.BODY])
        head = CosineHead.like(local.model.head, self.fixed_scale)
        load(head, {"prototypes": received[Part.PROTOTYPES]["mean"], "scale": received[Part.HEAD]["scale"]})
        local.model.head = head

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Train by eq. (2), then compute the class means [D] of eq. (3) with the trained body."""
        self.load_global(local, received)
        trained = train(local, lambda x, y: supervised(local, local.model(x), y))  # eq. (2)
        means = class_means(local, lambda x: normalize(local.model.body(x), dim=1), self._weigher(local))  # eq. (3)
        means = frequent(local, means, self.min_samples_per_class)
        rows = means if self.prototypes == "literal" else {c: normalize(mean, dim=0) for c, mean in means.items()}
        head = {} if self.fixed_scale else {Part.HEAD: {"scale": dump(local.model.head)["scale"]}}
        return local.update(
            {Part.BODY: dump(local.model.body), **head, Part.PROTOTYPES: named(rows)}, loss=trained.loss
        )

    def dp_cost(self, plan: Plan) -> DpCost:
        """One training, and class means."""
        return DpCost((plan.epochs,), class_releases=1)

    def sum_form(self) -> SumForm:
        """Body, scale, and class means."""
        if self.prototypes == "similarity":
            raise ConfigError(
                'FedNH with prototypes = "similarity" cannot be aggregated securely; expected "uniform" or "literal"'
            )
        means = (Part.BODY,) if self.fixed_scale else (Part.BODY, Part.HEAD)
        return SumForm(means, rows=ClassRows(Part.PROTOTYPES, (Part.PROTOTYPES, "mean")))

    def _weigher(self, local: FitContext) -> Weigher | None:
        if self.means == "plain":
            return None
        return lambda features, labels: local.model.head(features).softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1)
