"""Sums and counts of classes under `[plan.dp]`: one Gaussian mechanism on all units, whose contributions are clipped.

An image adds (v / R, w) / sqrt(2) to its class's row of a matrix [C, D + 1]: v its feature times its weight w, and R
`max_feature_norm`. So one of a feature of norm R at most adds a norm of 1 at most; what a unit adds with all its
images together is clipped to that. Then every number gets noise N(0, class_noise_multiplier^2).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from protofed.client.training.context import FitContext
from protofed.client.training.noisy_steps import dp_of
from protofed.common.errors import ConfigError

BATCH = 512
_HALF = math.sqrt(0.5)  # of the squared norm of an image's row each for feature and count


def noisy_means(local: FitContext, of_batch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
    """By class the mean [D] from a noisy sum and a noisy count, if that is at least `min_noisy_count`.

    In evaluation mode, without augmentation and gradients.

    Args:
        of_batch: images [B, channels, H, W], labels [B] -> features [B, D], times their weights, and weights [B].

    Raises:
        ConfigError, TaskFailedError: as of `noisy_matrix`.
    """
    bound = dp_of(local).plan.max_feature_norm
    values, labels = list[Tensor](), list[Tensor]()
    local.model.eval()
    with torch.no_grad():
        for images, of_images in local.data.ordered(local.data.train, BATCH):
            local.check()
            features, weights = of_batch(images, of_images)
            values.append(torch.cat((features / bound, weights.unsqueeze(1)), dim=1) * _HALF)
            labels.append(of_images)
        noisy = noisy_matrix(local, torch.cat(values), torch.cat(labels)) / _HALF  # [C, D + 1]
    counts = noisy[:, -1]
    present = _present(local, counts).flatten()
    means = (noisy[present, :-1] / counts[present].unsqueeze(1) * bound).to(values[0].dtype)
    return dict(zip(present.tolist(), means.unbind(), strict=True))


def label_shares(local: FitContext) -> Tensor:
    """The share of each class among the site's training labels, [C] float32 on the device, to be read only.

    With `plan.dp` it is one class release: of noisy counts, of which those below `min_noisy_count` are 0; uniform, if
    all are.
    """
    if local.plan.dp is None:
        return local.data.label_frequencies()
    labels = local.data.train.labels
    noisy = noisy_matrix(local, one_hot(labels, local.classes).double().sum(1, keepdim=True), labels)  # [C, 1]
    counts = torch.zeros_like(noisy[:, 0])
    present = _present(local, noisy[:, 0]).flatten()
    counts[present] = noisy[present, 0]
    if not len(present):
        counts += 1
    return (counts / counts.sum()).float().to(local.data.device)


def noisy_matrix(local: FitContext, values: Tensor, labels: Tensor) -> Tensor:
    """The sum by class of examples' values, with each unit's part clipped to norm 1, and noise: [C, E] float64.

    Args:
        values: of all training examples in their order, [N, E].
        labels: [N].

    Raises:
        ConfigError: the plan has no `class_noise_multiplier`, or there is no noise to draw.
        TaskFailedError: the method has not declared this release.
    """
    dp = dp_of(local)
    if (multiplier := dp.plan.class_noise_multiplier) is None:
        raise ConfigError("plan.dp.class_noise_multiplier is not set: this method releases class sums")
    release = dp.begin_release()
    values = values.double().nan_to_num(0.0, 0.0, 0.0)
    units = torch.arange(len(labels)) if local.data.train.units is None else local.data.train.units
    # Of a unit, by class: only so many pairs as there are, not units times classes.
    pairs, index = torch.unique(units.to(labels.device) * local.classes + labels, return_inverse=True)
    sums = values.new_zeros(len(pairs), values.shape[1]).index_add_(0, index, values)
    of_unit = pairs // local.classes
    squares = values.new_zeros(int(of_unit.max()) + 1).index_add_(0, of_unit, sums.square().sum(1))
    clipped = sums * squares.rsqrt().clamp(max=1.0)[of_unit].unsqueeze(1)
    total = values.new_zeros(local.classes, values.shape[1]).index_add_(0, pairs % local.classes, clipped)
    return total + multiplier * dp.noise.normal(total.shape, "classes", release, device=total.device)


def _present(local: FitContext, counts: Tensor) -> Tensor:
    """The classes whose noisy count [C] is enough, as indices [P, 1]."""
    return ((counts >= dp_of(local).plan.min_noisy_count) & (counts > 0)).nonzero()
