"""Scores of one class or finding against all others, by torchmetrics; and the bins of a reliability diagram."""

from __future__ import annotations

import torch
from torch import Tensor

from protofed.common.protocol.scores import BINS

SCORED = ("auroc", "average_precision", "sensitivity")
BELOW_ONE = 1 - 2**-53  # the largest confidence of the last bin: torchmetrics gives exactly 1 a bin of its own


def rank(values: Tensor) -> Tensor:
    """[N] float32 in [0, 1): equal where the values are, and else in their order.

    torchmetrics would take values outside of 0..1 for logits, and make ties of large ones.
    """
    places: Tensor = torch.unique(values, return_inverse=True)[1]
    return places / len(values)


def score_finding(values: Tensor, positive: Tensor, specificity: float) -> tuple[float, float, float] | None:
    """The scores of `SCORED`; None: all examples are positive, or none is.

    Args:
        values: the larger, the surer, [N].
        positive: [N], 1 or 0.
        specificity: the least at which the sensitivity is taken.
    """
    from torchmetrics.functional.classification import (  # seconds of imports
        binary_auroc,
        binary_average_precision,
        binary_sensitivity_at_specificity,
    )

    if not 0 < int(positive.sum()) < len(positive):
        return None
    ranks, truth = rank(values), positive.long()
    sensitivity, _ = binary_sensitivity_at_specificity(ranks, truth, specificity)
    return float(binary_auroc(ranks, truth)), float(binary_average_precision(ranks, truth)), float(sensitivity)


def reliability_bins(confidence: Tensor, right: Tensor) -> dict[str, float]:
    """What is true by confidence, in bins of equal width.

    For the predictions in bin b, `reliability.accuracy.<b>` is the share that is right, and `.confidence.<b>` the mean
    confidence. `.share.<b>` is the bin's share of all predictions. Empty bins are left out. The sum over b of share
    |accuracy - confidence| is `ece`.

    Args:
        confidence: [N] float64, in 0..1.
        right: [N] bool: whether the class is the predicted one, or the finding is there.
    """
    bins = (confidence.clamp(max=BELOW_ONE) * BINS).long()  # [N]
    values: dict[str, float] = {}
    for b in sorted(set(bins.tolist())):
        in_bin = bins == b
        values[f"reliability.accuracy.{b}"] = float(right[in_bin].double().mean())
        values[f"reliability.confidence.{b}"] = float(confidence[in_bin].mean())
        values[f"reliability.share.{b}"] = float(in_bin.double().mean())
    return values
