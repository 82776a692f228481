"""The gradients of a linear head by class, which CReFF sends."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from protofed.client.training.context import FitContext
from protofed.common.errors import ConfigError

BATCH = 64  # examples at a time: a matrix [C, D] each is in memory


def class_gradients(local: FitContext) -> dict[int, Tensor]:
    """The gradient of the cross-entropy by the model's head, mean over the site's training examples of each class.

    In evaluation mode, without augmentation, in one pass that draws no random number. A class without examples at the
    site is missing from the result.

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
    model.eval()
    sums = counts = None
    with torch.no_grad():
        for images, labels in local.data.ordered(local.data.train, BATCH):
            local.check()
            features = model.body(images)
            own = (labels.unsqueeze(1) == torch.arange(local.classes, device=labels.device)).to(features)  # [B, C]
            errors = head(features).softmax(dim=1) - own  # [B, C]: the gradient by the logits
            inputs = features if head.bias is None else pad(features, (0, 1), value=1.0)  # [B, E]
            by_example = errors.unsqueeze(2) * inputs.unsqueeze(1)  # [B, C, E]
            # Sums in float32 at least: thousands of bfloat16 numbers would lose whole digits.
            by_example = by_example.to(torch.promote_types(by_example.dtype, torch.float32))
            if sums is None or counts is None:
                sums = by_example.new_zeros(local.classes, *by_example.shape[1:])
                counts = by_example.new_zeros(local.classes)
            sums.index_add_(0, labels, by_example)
            counts += own.sum(dim=0)
    if sums is None or counts is None:
        return {}
    present = counts.nonzero().flatten()  # [P] the only time that the device is waited for
    means = sums[present] / counts[present].view(-1, 1, 1)
    return dict(zip(present.tolist(), means.unbind(), strict=True))
