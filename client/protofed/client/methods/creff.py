"""CReFF: Shang et al., IJCAI 2022, Algorithm 1, client side (METHODS §5.11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from protofed.client.method import (
    ONE_CLASS,
    ClassRows,
    Declaration,
    FitContext,
    Part,
    Payload,
    SumForm,
    Update,
    Weighting,
    class_gradients,
    client_methods,
    dump,
    frequent,
    load,
    load_joined,
    named,
    supervised,
    train,
)

RETRAINED = "retrained"  # of HEAD: the global model's classifier in one matrix, beside FedAvg's


@client_methods.register(creff=("features", "match_epochs", "match_lr", "crt_epochs", "crt_lr"))
@dataclass(frozen=True)
class CReFFClient:
    """FedAvg; and for each class a gradient of the global model's classifier, from which the server makes features."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks=ONE_CLASS,
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD, Part.CLASS_GRADIENTS})

    weighting: Weighting = "uniform"  # p_k of FedAvg: 1/K, or n_k/n from sites that disclose n_k
    min_samples_per_class: Annotated[int, Field(ge=1)] = 1  # images of a class, or its gradient stays

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load FedAvg's body and the re-trained classifier."""
        load(local.model.body, received[Part.BODY])
        load_joined(local.model.head, received[Part.HEAD][RETRAINED])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Gradients by class of the re-trained classifier; then FedAvg's ClientUpdate, from FedAvg's own one."""
        self.load_global(local, received)
        gradients = frequent(local, class_gradients(local), self.min_samples_per_class)
        load(local.model.head, {name: array for name, array in received[Part.HEAD].items() if name != RETRAINED})
        trained = train(local, lambda x, y: supervised(local, local.model(x), y))
        model = {Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}
        return local.update({**model, Part.CLASS_GRADIENTS: named(gradients)}, loss=trained.loss)

    def sum_form(self) -> SumForm:
        """The whole model, and gradients by class."""
        rows = ClassRows(Part.CLASS_GRADIENTS, (Part.HEAD, RETRAINED), whole=True)
        return SumForm((Part.BODY, Part.HEAD), self.weighting, rows)
