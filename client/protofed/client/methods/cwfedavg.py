"""cwFedAVG with WDR: Lee and Choi, arXiv 2406.07800v1, client side (METHODS §3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from protofed.client.method import (
    ONE_CLASS,
    ConfigError,
    Declaration,
    DpCost,
    FitContext,
    Part,
    Payload,
    Plan,
    SumForm,
    Update,
    Weighting,
    class_shares,
    client_methods,
    distribution_gap,
    dump,
    label_shares,
    load,
    mixture,
    supervised,
    train,
)


@client_methods.register("cwfedavg")
@dataclass(frozen=True)
class CwFedAvgClient:
    """Train the model that was mixed for this site; WDR shapes the head's row norms like the class distribution.

    From these norms the server gets an estimate of the site's class distribution, as part CLASS_SHARES, to mix by.
    Under secure aggregation it gets none: all sites are sent all class models, and each mixes by its own distribution.
    """

    declares: ClassVar[Declaration] = Declaration(
        personal="loaded",
        global_model=False,
        mixes_classes=True,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks=ONE_CLASS,
    )

    wdr: Annotated[float, Field(ge=0)] = 5.0  # lambda; multiplies Omega, as in the paper (released: -wd 10 is 5 here)
    shares: Literal["norms", "true"] = "norms"  # p~ of the head, or the true p ("w/ Dist."): in simulations, or summed
    layers: Literal["all", "head"] = "all"  # class-wise; with "head" the body is FedAvg's
    weighting: Weighting = "uniform"  # p_i: 1/M, or n_i/n from sites that disclose n_i

    @property
    def sends(self) -> frozenset[Part]:
        """The model and the class shares. By these the server weights this site's model for each class."""
        return frozenset({Part.BODY, Part.HEAD, self._shares_part})

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the model mixed for this site by the server; under secure aggregation by itself, sum_j p_j w_j^G."""
        if self.shares == "true" and Part.CLASS_MODELS in received:  # else what is sent would tell the true p
            received = {**received, **mixture(received[Part.CLASS_MODELS], local.data.label_frequencies())}
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Minimise cross-entropy + lambda Omega."""
        self.load_global(local, received)
        weight, p = local.model.head.get_parameter("weight"), label_shares(local)  # [C, D], [C]
        trained = train(
            local,
            lambda x, y: supervised(local, local.model(x), y),
            regularizer=(lambda: self.wdr * distribution_gap(weight, p)) if self.wdr else None,
        )
        shares = class_shares(weight.detach()) if self.shares == "norms" else p.to(weight)
        model = {Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}
        return local.update({**model, self._shares_part: {"shares": shares.cpu().numpy()}}, loss=trained.loss)

    def dp_cost(self, plan: Plan) -> DpCost:
        """One training, and noisy class counts, which give WDR's target p.

        Raises:
            ConfigError: the true shares are mixed by or sent.
        """
        if self.shares == "true":
            raise ConfigError('method.shares = "true" needs exact shares; with [plan.dp] set method.shares = "norms"')
        return DpCost((plan.epochs,), class_releases=1)

    def sum_form(self) -> SumForm:
        """The model by class, with this site's true shares; with `layers = "head"` the head by class, and the body."""
        if self.shares != "true":
            raise ConfigError(
                'cwfedavg with shares = "norms" sends its class shares, which a secure aggregation must hide'
            )
        common, by_class = ((Part.BODY,), (Part.HEAD,)) if self.layers == "head" else ((), (Part.BODY, Part.HEAD))
        return SumForm(common, self.weighting, mixtures=by_class, shares=Part.LABEL_DISTRIBUTION)

    @property
    def _shares_part(self) -> Part:
        return Part.CLASS_SHARES if self.shares == "norms" else Part.LABEL_DISTRIBUTION
