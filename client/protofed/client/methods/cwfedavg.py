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
    """Train the mixed model so that the norms of its head's rows tell the site's class distribution.

    That is what WDR is for: the server learns an estimate of the distribution, as part CLASS_SHARES.
    """

    personal: ClassVar[Personal] = "installed"

    wdr: Annotated[float, Field(ge=0)] = 5.0  # lambda; multiplies Omega, as in the paper (released: -wd 10 is 5 here)
    shares: Literal["norms", "true"] = "norms"  # p~ of the head, or the true p ("w/ Dist."): in simulations only

    @property
    def sends(self) -> frozenset[Part]:
        """The model, and what the server mixes by."""
        return frozenset({Part.BODY, Part.HEAD, self._shares_part})

    def install(self, local: FitContext, received: Payload) -> None:
        """The model that the server mixed for this site."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Cross-entropy + lambda Omega."""
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
