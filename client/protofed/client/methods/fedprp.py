"""FedPRP: Guo et al., IEEE TNNLS 2024, client side (METHODS §2.3: the paper, not its released code)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, ones

from protofed.client.method import (
    ONE_CLASS,
    ClassRows,
    ConfigError,
    Declaration,
    Distance,
    DpCost,
    FitContext,
    Part,
    Payload,
    Plan,
    PrototypeHead,
    SumForm,
    Update,
    class_means,
    client_methods,
    dump,
    frequent,
    inter_class,
    intra_class,
    load,
    named,
    remembered,
    stacked,
    supervised,
    train,
    train_head,
)


@client_methods.register(fedprp=("prototype_momentum",))
@dataclass(frozen=True)
class FedPRPClient:
    """Train the private head, then the shared body on three losses; send the body and its class prototypes."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks=ONE_CLASS,
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.PROTOTYPES})

    head_epochs: Annotated[int, Field(ge=0)] = 5  # tau_phi; the plan's epochs are the body's, tau_theta
    intra: Annotated[float, Field(ge=0)] = 0.5  # lambda_1, of eq. (10)
    inter: Annotated[float, Field(ge=0)] = 0.5  # lambda_2, of eq. (9)
    temperature: Annotated[float, Field(gt=0)] = 0.07  # tau of eq. (9)
    distance: Literal["euclidean", "cosine"] = "euclidean"  # d of eq. (9)
    margins: Literal["learned", "fixed"] = "fixed"  # eps of eq. (9): the release's 1, or learned from 1 with the body
    prediction: Literal["prototypes", "head"] = "prototypes"  # of the site's own model: eq. (12), or the private head
    compat: Literal["paper", "authors"] = "paper"  # authors: eq. (9) with their code's negated cosine, margins fixed
    min_samples_per_class: Annotated[int, Field(ge=1)] = 1  # images of a class, or its mean stays: see policies, too

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the global body and prototypes [C, D]; the site's private head, at first the run's first one."""
        load(local.model.body, received[Part.BODY])
        own = self.prediction == "head" and Part.HEAD in local.client_state  # the first head is another body's
        head = local.model.head = PrototypeHead.around(local.model.head, local.classes, own)
        load(head.own, local.client_state.get(Part.HEAD, received[Part.HEAD]))
        head.set_prototypes(*stacked(received.get(Part.PROTOTYPES, {}), local.classes, head.prototypes))

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Head, then body (eqs. 3 and 4), then the prototypes of the trained body (eq. 7)."""
        self.load_global(local, received)
        body, head, released = local.model.body, PrototypeHead.of(local.model), self.compat == "authors"
        centroids = stacked(named(class_means(local, body) if self.inter else {}), local.classes, head.prototypes)[0]
        train_head(local, head.own, self.head_epochs)
        eps = remembered(local, Part.PROTOTYPES, "margins", ones(local.classes)).to(head.prototypes)  # [C]
        learned = not released and self.margins == "learned"
        eps.requires_grad_(learned)
        distance: Distance = "negated-cosine" if released else self.distance

        def objective(images: Tensor, labels: Tensor) -> Tensor:  # eq. (11)
            features = body(images)
            intra = intra_class(features, labels, head.prototypes, head.known > 0)
            loss = supervised(local, head.own(features), labels) + self.intra * intra
            if not self.inter:
                return loss
            inter = inter_class(features, labels, centroids, eps.clamp_min(0), self.temperature, distance)
            return loss + self.inter * inter

        trained = train(local, objective, [*body.parameters(), eps])
        head.set_prototypes(*stacked(named(means := class_means(local, body)), local.classes, head.prototypes))
        margins = {Part.PROTOTYPES: {"margins": eps.detach().cpu().numpy()}} if learned else {}
        local.client_state.update({Part.HEAD: dump(head.own), **margins})
        head.by_own = self.prediction == "head"
        sent = named(frequent(local, means, self.min_samples_per_class))
        return local.update({Part.BODY: dump(body), Part.PROTOTYPES: sent}, loss=trained.loss)

    def dp_cost(self, plan: Plan) -> DpCost:
        """Head, then body, and class means; without eq. (9), a softmax over the images of a batch, by no single one.

        Raises:
            ConfigError: eq. (9) is in the loss, or its margins are trained without it.
        """
        if self.inter:
            raise ConfigError(
                f"method.inter = {self.inter:g} compares the images of a batch with each other, and [plan.dp] clips "
                "what each patient adds. Set method.inter = 0"
            )
        if self.margins == "learned" and self.compat != "authors":
            raise ConfigError(
                'method.margins = "learned" trains margins that no loss uses if method.inter = 0, and [plan.dp] '
                'needs a gradient of all that is trained. Set method.margins = "fixed"'
            )
        return DpCost((self.head_epochs, plan.epochs), class_releases=1)

    def sum_form(self) -> SumForm:
        """The body, and class means."""
        return SumForm((Part.BODY,), rows=ClassRows(Part.PROTOTYPES, (Part.HEAD, "weight")))
