"""The plan's optimizers by PyTorch's functional API, which does the arithmetic of `torch.optim`'s classes.

The first instance of such a class imports PyTorch's compiler: a second of processor in every process that trains, and
nothing of it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from protofed.common.config.recipe import OptimizerName, Plan

Moments = dict[str, Tensor]  # of one parameter, by the names in `torch.optim`: averages of its shape, and `step` []


@dataclass(frozen=True, eq=False)
class ParameterGroup:
    """Tensors that `train` moves by settings of their own, apart from all others; None: as the plan has it.

    The norm of a group's gradients is clipped by itself, so what is trained beside a model does not change its steps.

    Attributes:
        parameters: of any shapes. What needs no gradient is not moved, but checkpoints cover it.
        lr: of this call of `train`; None: `FitContext.lr`.
        max_grad_norm: infinite: gradients are not clipped.
    """

    parameters: Iterable[Tensor]
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None
    optimizer: OptimizerName | None = None


def sgd_length(steps: int, momentum: float, pull: float = 0.0) -> float:
    """How far so many steps of SGD lead by gradients of 1, in learning rates: without momentum and pull, `steps`.

    Of gradients g it is what their weights in the sum of all steps add up to: FedNova's ||a||_1 (METHODS §5.23).

    Args:
        pull: eta mu, the share of the way back that a proximal term takes off in a step.
    """
    velocity = length = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1 - pull * length
        length += velocity
    return length


class Optimizer:
    """The optimizer of one group in one call of `train`, with `torch.optim`'s defaults where the plan says nothing.

    Attributes:
        trained: what it moves, tensors of any shapes.
        moments: by the parameter's number; of those that have had a gradient.
    """

    def __init__(self, plan: Plan, trained: Sequence[Tensor], lr: float) -> None:
        self._plan, self.trained, self._lr = plan, trained, lr
        self.moments: dict[int, Moments] = {}

    @classmethod
    def of(cls, group: ParameterGroup, plan: Plan, lr: float) -> Optimizer:
        """The group's, by the plan where the group says nothing.

        Args:
            lr: of the round.
        """
        names = ("momentum", "weight_decay", "max_grad_norm", "optimizer")
        own = {name: value for name in names if (value := getattr(group, name)) is not None}
        trained = [tensor for tensor in group.parameters if tensor.requires_grad]
        return cls(plan.model_copy(update=own), trained, lr if group.lr is None else group.lr)

    @torch.no_grad()
    def step(self) -> None:
        """Clip the gradients, then move the parameters in place; those without a gradient stay, with their moments."""
        if (most := self._plan.max_grad_norm) is not None and most < math.inf:
            nn.utils.clip_grad_norm_(self.trained, most)
        numbers, tensors, gradients = [], [], []
        for number, tensor in enumerate(self.trained):
            if (gradient := tensor.grad) is not None:
                numbers.append(number)
                tensors.append(tensor)
                gradients.append(gradient)
        if not tensors:
            return
        if self._plan.optimizer == "sgd":
            self._step_sgd(numbers, tensors, gradients)
        else:
            self._step_adam(numbers, tensors, gradients)

    def _step_sgd(self, numbers: list[int], tensors: list[Tensor], gradients: list[Tensor]) -> None:
        buffers = [self.moments.get(number, {}).get("momentum_buffer") for number in numbers]
        sgd(
            tensors,
            gradients,
            buffers,
            lr=self._lr,
            momentum=self._plan.momentum,
            weight_decay=self._plan.weight_decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for number, buffer in zip(numbers, buffers, strict=True):
            if buffer is not None:  # `sgd` makes them in the first step, if there is momentum
                self.moments[number] = {"momentum_buffer": buffer}

    def _step_adam(self, numbers: list[int], tensors: list[Tensor], gradients: list[Tensor]) -> None:
        for number, tensor in zip(numbers, tensors, strict=True):
            if number not in self.moments:
                averages = {name: torch.zeros_like(tensor) for name in ("exp_avg", "exp_avg_sq")}
                self.moments[number] = {"step": torch.tensor(0.0), **averages}  # on the CPU: no step waits for a GPU
        moments = [self.moments[number] for number in numbers]
        rule = adam if self._plan.optimizer == "adam" else adamw
        rule(
            tensors,
            gradients,
            exp_avgs=[moment["exp_avg"] for moment in moments],
            exp_avg_sqs=[moment["exp_avg_sq"] for moment in moments],
            max_exp_avg_sqs=[],
            state_steps=[moment["step"] for moment in moments],
            lr=self._lr,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=self._plan.weight_decay,
            amsgrad=False,
            maximize=False,
        )
