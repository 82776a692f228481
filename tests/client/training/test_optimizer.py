"""The optimizers give the bytes of `torch.optim`'s classes, which they do without."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from protofed.client.training.progress import Optimizer
from protofed.common.config.recipe import Plan

STEPS = 5
SHAPES = [(8, 3, 3, 3), (8,), (), (10, 33)]
PLANS: list[tuple[str, float, float]] = [  # optimizer, momentum, weight decay
    *(("sgd", momentum, decay) for momentum in (0.0, 0.9) for decay in (0.0, 1e-4)),
    *((optimizer, 0.0, decay) for optimizer in ("adam", "adamw") for decay in (0.0, 1e-2)),
]
Make = Callable[[Iterable[Tensor], Plan], torch.optim.Optimizer]
CLASSES: dict[str, Make] = {
    "sgd": lambda trained, plan: torch.optim.SGD(
        trained, lr=plan.lr, momentum=plan.momentum, weight_decay=plan.weight_decay
    ),
    "adam": lambda trained, plan: torch.optim.Adam(trained, lr=plan.lr, weight_decay=plan.weight_decay),
    "adamw": lambda trained, plan: torch.optim.AdamW(trained, lr=plan.lr, weight_decay=plan.weight_decay),
}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


def trained_on(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in SHAPES]


def steps(trained: list[Tensor], optimizer: Optimizer | torch.optim.Optimizer) -> None:
    """Random gradients; the first parameter has its first one in the second step, and the last none in the third."""
    generator = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        for tensor in trained:
            tensor.grad = torch.randn(tensor.shape, generator=generator).to(tensor.device)
        if step in (0, 2):
            trained[0 if step == 0 else -1].grad = None
        optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("optimizer", "momentum", "decay"), PLANS)
def test_parameters_and_moments_are_those_of_pytorchs_classes(
    optimizer: str, momentum: float, decay: float, device: str
) -> None:
    plan = Plan.model_validate({"lr": 0.1, "optimizer": optimizer, "momentum": momentum, "weight_decay": decay})
    ours, theirs = trained_on(device), trained_on(device)
    made, expected = Optimizer(plan, ours, plan.lr), CLASSES[optimizer](theirs, plan)
    steps(ours, made)
    steps(theirs, expected)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
    # A checkpoint holds the moments under these very numbers and names.
    state = expected.state_dict()["state"]
    assert made.moments.keys() == state.keys()
    for number, moments in made.moments.items():
        assert moments.keys() == state[number].keys()
        for name, moment in moments.items():
            assert torch.equal(moment, state[number][name])
            assert moment.device == state[number][name].device
