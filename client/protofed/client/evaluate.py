"""Scores of a model on a test set (METHODS §7), from nothing but correct answers and examples by class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from protofed.client.data.examples import SiteData


@dataclass(frozen=True, eq=False)
class Tally:
    """How a model did on a test set, class by class.

    Attributes:
        correct: [C] int64 on the CPU, examples of the class that the model recognises.
        totals: [C] int64 on the CPU, examples of the class.
    """

    correct: Tensor
    totals: Tensor


def tally(model: nn.Module, data: SiteData, batch: int = 512) -> Tally:
    """The model's answers on `data.test`, on the model's device, in evaluation mode; its own modes are put back."""
    device = next((p.device for p in model.parameters()), data.device)
    with _evaluating(model), torch.no_grad():
        right = [model(x.to(device)).argmax(1) == y.to(device) for x, y in data.ordered(data.test, batch)]
    labels = data.test.labels.cpu()
    correct = labels[torch.cat(right).cpu()]
    return Tally(correct.bincount(minlength=data.classes), labels.bincount(minlength=data.classes))


def global_scores(correct: Tensor, totals: Tensor) -> dict[str, float]:
    """`global.accuracy` (GM) and `global.balanced_accuracy` of the global model; both [C].

    Balanced accuracy is the mean recall of the classes that the test set has; the others have no recall and no say.
    """
    return {f"global.{name}": value for name, value in _accuracies(correct, totals).items()}


def personal_scores(correct: Tensor, totals: Tensor, frequencies: Tensor) -> dict[str, float]:
    """The scores of a site's own model; all [C], `frequencies` are n_{k,c} / n_k of the site's training labels.

    `personal.accuracy` and `personal.balanced_accuracy` are those of `global_scores`;
    `personal.pm_v` is the accuracy on the test examples of the site's own classes: PM(V)_k;
    `personal.pm_l` weighs every test example by its class's frequency at the site: PM(L)_k.
    The last two are left out, never 0 or NaN, where the test set has no example of any of the site's classes.
    """
    scores = {f"personal.{name}": value for name, value in _accuracies(correct, totals).items()}
    for name, weights in (("pm_v", frequencies > 0), ("pm_l", frequencies)):
        share = _share(correct, totals, weights)
        scores |= {} if share is None else {f"personal.{name}": share}
    return scores


def _accuracies(correct: Tensor, totals: Tensor) -> dict[str, float]:
    """Of a test set with at least one example."""
    tested = totals > 0
    recalls = correct[tested].double() / totals[tested]
    return {"accuracy": int(correct.sum()) / int(totals.sum()), "balanced_accuracy": float(recalls.mean())}


def _share(correct: Tensor, totals: Tensor, weights: Tensor) -> float | None:
    """sum_c w_c correct_c / sum_c w_c T_c; None where there is nothing to divide by."""
    weights = weights.cpu().double()
    total = float(weights @ totals.double())
    return float(weights @ correct.double()) / total if total else None


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module is in the mode that it was in, which need not be one for all."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
