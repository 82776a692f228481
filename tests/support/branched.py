"""A method that takes all that `train` offers: groups, a second step on each batch, and tensors changed in between."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from protofed.client.method import FitContext, ParameterGroup, Part, Payload, Step, Update, dump, supervised, train
from protofed.client.methods.fedavg import FedAvgClient

NAME = "branched"


@dataclass(frozen=True)
class Branched(FedAvgClient):
    """FedAvg that is corrected after each step as SCAFFOLD is, and APFL's own branch v and alpha beside it."""

    def fit(self, local: FitContext, received: Payload) -> Update:
        """All of it in one loop; v, alpha, the corrections and their number are remembered."""
        self.load_global(local, received)
        model, branch = local.model, _Branch.of(local)
        groups = [
            ParameterGroup(model.parameters()),
            ParameterGroup(branch.v.values()),
            ParameterGroup([branch.alpha], lr=0.2, momentum=0.0, weight_decay=0.02, max_grad_norm=math.inf),
            ParameterGroup([*branch.corrections, branch.count]),  # need no gradient: kept, not trained
        ]
        after = partial(branch.after, local)
        trained = train(local, lambda x, y: supervised(local, model(x), y), groups, after=after)
        assert trained.steps == int(branch.count)
        kept = {**branch.v, **{f"c{n}": c for n, c in enumerate(branch.corrections)}, "alpha": branch.alpha}
        local.client_state[Part.BODY] = {name: tensor.detach().cpu().numpy() for name, tensor in kept.items()}
        return local.update({Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}, loss=trained.loss)


@dataclass(frozen=True, eq=False)
class _Branch:
    v: dict[str, Tensor]
    alpha: Tensor  # []
    corrections: list[Tensor]  # of the model's parameters
    count: Tensor  # [] of steps

    @classmethod
    def of(cls, local: FitContext) -> _Branch:
        """It starts from the model that was received."""
        parameters = dict(local.model.named_parameters())
        v = {name: (1.1 * tensor.detach()).requires_grad_() for name, tensor in parameters.items()}
        corrections = [torch.zeros_like(tensor) for tensor in parameters.values()]
        like = next(iter(v.values()))
        return cls(v, like.new_tensor(0.5).requires_grad_(), corrections, torch.zeros((), dtype=torch.int64))

    def after(self, local: FitContext, step: Step) -> None:
        """Correct w by a running mean of itself, which takes a random number; then v's and alpha's step."""
        share = 0.1 * torch.rand((), generator=local.rng).item()
        for parameter, correction in zip(local.model.parameters(), self.corrections, strict=True):
            parameter.sub_(local.lr * correction)
            correction.lerp_(parameter, share)
        w = dict(local.model.named_parameters())

        def mixed(images: Tensor, labels: Tensor) -> Tensor:
            values = {name: self.alpha * self.v[name] + (1 - self.alpha) * w[name].detach() for name in w}
            return supervised(local, functional_call(local.model, values, (images,)), labels)

        step(mixed)
        self.alpha.clamp_(0, 1)
        self.count.add_(1)
