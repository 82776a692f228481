"""cwFedAVG with WDR: Lee and Choi, arXiv 2406.07800v1, client side (METHODS §3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch.nn.functional import cross_entropy

from protofed.client.method import (
    FitContext,
    Part,
    Payload,
    Personal,
    Update,
    class_shares,
    client_methods,
    distribution_gap,
    dump,
    load,
    train,
)


@client_methods.register(cwfedavg=("layers", "weighting"))
@dataclass(frozen=True)
class CwFedAvgClient:
    """Train the model that the server mixed for this site; WDR shapes the head's row norms like the class distribution.

    From these norms the server gets an estimate of the site's class distribution, as part CLASS_SHARES.
    """

    personal: ClassVar[Personal] = "installed"

    wdr: Annotated[float, Field(ge=0)] = 5.0  # lambda; multiplies Omega, as in the paper (released: -wd 10 is 5 here)
    shares: Literal["norms", "true"] = "norms"  # p~ of the head, or the true p ("w/ Dist."): in simulations only

    @property
    def sends(self) -> frozenset[Part]:
        """The model and the class shares, by which the server weights this site's model for each class."""
        return frozenset({Part.BODY, Part.HEAD, self._shares_part})

    def install(self, local: FitContext, received: Payload) -> None:
        """Load the model that the server mixed for this site."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Minimise cross-entropy + lambda Omega."""
        self.install(local, received)
        weight, p = local.model.head.get_parameter("weight"), local.data.label_frequencies()  # [C, D], [C]
        if self.wdr:
            loss = train(local, lambda x, y: cross_entropy(local.model(x), y) + self.wdr * distribution_gap(weight, p))
        else:
            loss = train(local, lambda x, y: cross_entropy(local.model(x), y))
        shares = class_shares(weight.detach()) if self.shares == "norms" else p.to(weight)
        model = {Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}
        return local.update({**model, self._shares_part: {"shares": shares.cpu().numpy()}}, loss=loss)

    @property
    def _shares_part(self) -> Part:
        return Part.CLASS_SHARES if self.shares == "norms" else Part.LABEL_DISTRIBUTION
