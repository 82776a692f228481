"""FedProc: Mu et al., 2021 (Future Generation Computer Systems 143), client side (METHODS §4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from protofed.client.method import (
    ONE_CLASS,
    ClassRows,
    ComparedBy,
    Declaration,
    DpCost,
    FitContext,
    Part,
    Payload,
    Plan,
    SumForm,
    Update,
    Weighting,
    class_means,
    client_methods,
    dump,
    frequent,
    load,
    named,
    prototypical_contrast,
    stacked,
    supervised,
    train,
)


@client_methods.register("fedproc")
@dataclass(frozen=True)
class FedProcClient:
    """l = alpha l_gpc + (1 - alpha) l_ce with alpha = 1 - t/T: first align features with prototypes, then classify."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks=ONE_CLASS,
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD, Part.PROTOTYPES})
    compared_by: ClassVar[ComparedBy] = "direction"

    weighting: Weighting = "uniform"  # p_k: 1/K, or n_k/n from sites that disclose n_k
    gpc_from_start: bool = False  # round 1 only makes prototypes, as in the paper; else it trains on l_ce, as released
    prototypes: Literal["mean", "unit"] = "mean"  # of unit features; "unit": only the mean's direction leaves
    min_samples_per_class: Annotated[int, Field(ge=1)] = 1  # images of a class, or its mean stays: see policies, too

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the global model."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Train, then send the class means [D] of the trained body's unit features."""
        self.load_global(local, received)
        loss = 0.0 if self._only_prototypes(local) else self._train(local, received)
        means = class_means(local, lambda x: normalize(local.model.body(x), dim=1))
        means = frequent(local, means, self.min_samples_per_class)
        rows = {c: normalize(mean, dim=0) if self.prototypes == "unit" else mean for c, mean in means.items()}
        model = {Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}
        return local.update({**model, Part.PROTOTYPES: named(rows)}, loss=loss)

    def dp_cost(self, plan: Plan) -> DpCost:
        """One training, and class means."""
        return DpCost((plan.epochs,), class_releases=1)

    def sum_form(self) -> SumForm:
        """The whole model, and class means."""
        return SumForm((Part.BODY, Part.HEAD), self.weighting, ClassRows(Part.PROTOTYPES, (Part.HEAD, "weight")))

    def _train(self, local: FitContext, received: Payload) -> float:
        like = next(local.model.head.parameters())  # [C, D]
        centers, known = stacked(received.get(Part.PROTOTYPES, {}), local.classes, like)
        centers = normalize(centers, dim=1)
        ahead = int(self.gpc_from_start and local.rounds > 1)  # rounds before the paper's t = 0
        alpha = 1 - (local.round - 1 - ahead) / (local.rounds - ahead) if known.any() else 0.0

        def loss(images: Tensor, labels: Tensor) -> Tensor:  # [B, channels, H, W], [B] -> []
            features = local.model.body(images)
            contrast = prototypical_contrast(normalize(features, dim=1), labels, centers, known, unit=True)
            return alpha * contrast + (1 - alpha) * supervised(local, local.model.head(features), labels)

        return train(local, loss).loss

    def _only_prototypes(self, local: FitContext) -> bool:
        return self.gpc_from_start and local.round == 1 and local.rounds > 1
