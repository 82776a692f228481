"""The gradients of a linear head by class, which CReFF sends."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from protofed.client.training.context import FitContext
from protofed.client.training.loop import in_full, means_by_class
from protofed.common.errors import ConfigError

BATCH = 64  # examples at a time: a matrix [C, D] each is in memory


def class_gradients(local: FitContext) -> dict[int, Tensor]:
    """The gradient of the cross-entropy by the model's head, mean over the site's training examples of each class.

    As `means_by_class` has them: a class without examples at the site is missing from the result.

    Returns:
        By class [C, D], of the weight; [C, D + 1] of a head with a bias, whose gradient is the last column.

    Raises:
        ConfigError: the head is not linear.
    """
    model, head = local.model, local.model.head
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"the model's head is a {type(head).__name__}: expected a torch.nn.Linear, whose gradients have this form"
        )

    def of_batch(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        features = model.body(images)
        own = (labels.unsqueeze(1) == torch.arange(local.classes, device=labels.device)).to(features)  # [B, C]
        errors = head(features).softmax(dim=1) - own  # [B, C]: the gradient by the logits
        inputs = features if head.bias is None else pad(features, (0, 1), value=1.0)  # [B, E]
        by_example = in_full(errors.unsqueeze(2) * inputs.unsqueeze(1))  # [B, C, E]
        return by_example, torch.ones_like(labels, dtype=by_example.dtype)

    return means_by_class(local, of_batch, BATCH)
