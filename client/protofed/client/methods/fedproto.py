"""FedProto: Tan et al., AAAI 2022, Algorithm 1, client side (METHODS §5.9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from protofed.client.method import (
    ONE_CLASS,
    ClassRows,
    Declaration,
    FitContext,
    Part,
    Payload,
    PrototypeHead,
    SumForm,
    Update,
    class_means,
    client_methods,
    dump,
    frequent,
    intra_class,
    load,
    named,
    stacked,
    supervised,
    train,
)


@client_methods.register("fedproto")
@dataclass(frozen=True)
class FedProtoClient:
    """Sites share class prototypes alone: each trains a model of its own towards the global prototypes."""

    declares: ClassVar[Declaration] = Declaration(
        personal="loaded",
        global_model=False,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks=ONE_CLASS,
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.PROTOTYPES})

    lam: Annotated[float, Field(ge=0)] = 1.0  # lambda of eq. (7): 0 trains alone
    min_samples_per_class: Annotated[int, Field(ge=1)] = 1  # images of a class, or its mean stays: see policies, too

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the site's own model, at first the run's; it predicts the class of the nearest global prototype."""
        own = local.client_state if Part.BODY in local.client_state else received
        load(local.model.body, own[Part.BODY])
        head = local.model.head = PrototypeHead.around(local.model.head, local.classes, by_own=False)
        load(head.own, own[Part.HEAD])
        head.set_prototypes(*stacked(received.get(Part.PROTOTYPES, {}), local.classes, head.prototypes))

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Minimise L_S + lambda L_R, eq. (7); send the class means [D] of the trained body's features, eq. (3)."""
        self.load_global(local, received)
        body, head = local.model.body, PrototypeHead.of(local.model)

        def objective(images: Tensor, labels: Tensor) -> Tensor:  # [B, channels, H, W], [B] -> []
            drawn = intra_class(z := body(images), labels, head.prototypes, head.known > 0)
            return supervised(local, head.own(z), labels) + self.lam * drawn

        trained = train(local, objective)
        local.client_state.update({Part.BODY: dump(body), Part.HEAD: dump(head.own)})
        means = frequent(local, class_means(local, body), self.min_samples_per_class)
        return local.update({Part.PROTOTYPES: named(means)}, loss=trained.loss)

    def sum_form(self) -> SumForm:
        """Class means."""
        return SumForm((), rows=ClassRows(Part.PROTOTYPES, (Part.HEAD, "weight")))
