"""APFL: Deng, Kamani and Mahdavi, arXiv 2003.13461, Algorithm 1 (METHODS §5.12)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from protofed.client.method import (
    Declaration,
    FitContext,
    ParameterGroup,
    Part,
    Payload,
    Step,
    SumForm,
    Update,
    Weighting,
    client_methods,
    dump,
    load,
    remembered,
    supervised,
    train,
)


@client_methods.register("apfl")
@dataclass(frozen=True)
class APFLClient:
    """FedAvg's global model w; beside it a model v of the site's own, and alpha, its share in what the site uses."""

    declares: ClassVar[Declaration] = Declaration(
        personal="loaded",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD})

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5  # of a site's first round
    adapt: Literal["round", "step", "never"] = "round"  # alpha takes a step by a round's first batch, or by each
    alpha_decay: Annotated[float, Field(ge=0)] = 0.0  # FedTorch's code has 0.02, which draws alpha to 0
    weighting: Weighting = "uniform"  # p_k of w: 1/K, or n_k/n from sites that disclose n_k

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load alpha v + (1 - alpha) w; before the site's first fit, w."""
        local.model.load_state_dict(_mixture(*self._loaded(local, received)))

    def fit(self, local: FitContext, received: Payload) -> Update:
        """By each batch w's step of FedAvg, which is sent; then v's, and alpha's, by the gradient at their mixture."""
        model, (w, v, alpha) = local.model, self._loaded(local, received)
        learned = torch.full_like(alpha, self.adapt != "never")  # 1, or 0: alpha stays; no step waits for its value

        def after(step: Step) -> None:
            before = alpha.clone()
            step(lambda x, y: supervised(local, torch.func.functional_call(model, _mixture(w, v, alpha), (x,)), y))
            alpha.copy_(torch.lerp(before, alpha.clamp(0, 1), learned))
            learned.mul_(self.adapt == "step")

        of_alpha = ParameterGroup([alpha, learned], None, 0.0, self.alpha_decay, torch.inf, "sgd")
        groups = [ParameterGroup(w.values()), ParameterGroup(v.values()), of_alpha]
        trained = train(local, lambda x, y: supervised(local, model(x), y), groups, after=after)
        local.client_state[Part.PRIVATE] = {name: t.detach().cpu().numpy() for name, t in {**v, "alpha": alpha}.items()}
        return local.update({Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}, loss=trained.loss)

    def sum_form(self) -> SumForm:
        """The whole global model."""
        return SumForm((Part.BODY, Part.HEAD), self.weighting)

    def _loaded(self, local: FitContext, received: Payload) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """W, v with statistics of its own, and alpha; a site that has no v begins with w."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])
        v, w = dict[str, Tensor](), dict[str, Tensor](local.model.named_parameters())
        for name, tensor in local.model.state_dict(keep_vars=True).items():
            own = remembered(local, Part.PRIVATE, name, tensor.detach().clone())
            v[name] = own.to(tensor).requires_grad_(tensor.requires_grad)
        alpha = remembered(local, Part.PRIVATE, "alpha", torch.tensor(self.alpha, dtype=torch.float64))
        return w, v, alpha.to(next(iter(w.values()))).requires_grad_()


def _mixture(w: dict[str, Tensor], v: dict[str, Tensor], alpha: Tensor) -> dict[str, Tensor]:
    return {name: torch.lerp(w[name].detach(), own, alpha) if name in w else own for name, own in v.items()}
