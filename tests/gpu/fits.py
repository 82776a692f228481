"""Small fits that several parts compare: made-up images that can be learnt, the catalogue's models, the real loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.models.catalogue import device_model
from protofed.client.training.context import FitContext, seeded
from protofed.client.training.loop import train
from protofed.common.config.recipe import Recipe

CLASSES = 10
SHAPE = (3, 32, 32)
TOLERANCE = 1e-2  # of updates in float32: cuDNN takes faster and coarser algorithms as it sees fit


def examples(count: int) -> Examples:
    """As many images uint8 [N, 3, 32, 32] of ten classes, each a pattern under noise."""
    draw = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, *SHAPE, generator=draw)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    noise = torch.randn(count, *SHAPE, generator=draw)
    return Examples((128 + 40 * patterns[labels] + 30 * noise).clamp(0, 255).to(torch.uint8), labels)


def recipe_of(model: dict[str, Any], **plan: Any) -> Recipe:
    """A recipe with images of CIFAR's shape."""
    mean_std = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    return Recipe.model_validate(
        {
            "name": "gpu",
            "rounds": 2,
            "classes": CLASSES,
            "input": {"shape": SHAPE, **mean_std},
            "method": {"name": "fedavg"},
            "model": model,
            "plan": {"epochs": 1, "lr": 0.01, "momentum": 0.9, **plan},
        }
    )


def fit_context(
    device: torch.device, train_set: Examples, model: dict[str, Any] | None = None, **plan: Any
) -> FitContext:
    """One site in its first round, as its daemon makes it, with the same model and batches on every device.

    Args:
        model: name and options; None: ResNet-18 with GroupNorm.
        plan: keys of the recipe's [plan].
    """
    recipe = recipe_of(model or {"name": "resnet18"}, **plan)
    torch.manual_seed(0)
    made = device_model(recipe, device, frozenset())
    data = SiteData(train_set, train_set.take(torch.arange(2)), recipe.input, CLASSES).placed(device)
    return FitContext("site", 1, 2, made, data, CLASSES, recipe.plan, seeded(0, 1, "site", device), {})


def loss_of(local: FitContext) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy of the model's logits: images [B, 3, H, W] and labels [B] -> []."""
    return lambda images, labels: cross_entropy(local.model(images), labels)


def update_of(local: FitContext, fit: Callable[[], float] | None = None) -> tuple[float, Tensor]:
    """The mean loss of a fit, and by how much it moved all parameters, flat float64 [P] on the CPU.

    Args:
        fit: None: `train` with cross-entropy.
    """
    before = _flat(local)
    loss = train(local, loss_of(local)).loss if fit is None else fit()
    return loss, _flat(local) - before


def difference(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference of two vectors [P], relative to the second one's."""
    return float((found - expected).norm() / expected.norm()) if expected.norm() else math.inf


@contextmanager
def exact() -> Iterator[None]:
    """Convolutions in float32 proper: TF32's ten bits would hide what is compared here."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _flat(local: FitContext) -> Tensor:
    return torch.cat([parameter.detach().double().cpu().flatten() for parameter in local.model.parameters()])
