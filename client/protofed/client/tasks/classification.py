"""Classification: each image has one of C classes.

Targets are [N] int64. The loss is the cross-entropy of a softmax; `plan.loss` has others, which correct for a site's
class frequencies (`training.losses`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from protofed.client.task import CONSTANT, LeftOut, OwnLabel, OwnNames, Predictions
from protofed.client.tasks.findings import BELOW_ONE, SCORED, reliability_bins, score_finding
from protofed.common.config.recipe import Recipe
from protofed.common.config.tasks import Classification
from protofed.common.errors import ConfigError, DataError
from protofed.common.protocol.scores import BINS

ROWS = 1024  # of logits that are in float64 at a time
# A test set with a larger share of one class has no score in a sum: honest models would often be constant there, and
# one site's random numbers take the score of all. That is known before any model is.
MAX_MAJORITY = 0.9


@dataclass(frozen=True)
class ClassificationTask:
    """The client half of `protofed.common.config.tasks.Classification`."""

    options: Classification

    def read(self, own: OwnLabel, names: OwnNames) -> int | LeftOut:
        """The class that the label is one's own name of."""
        classes = names.classes.get(own.text, ())
        return classes[0] if len(classes) == 1 else LeftOut(own.text, own.text in names.ignored)

    def from_array(self, labels: NDArray[Any], classes: int) -> Tensor:
        """Whole numbers, one for each example."""
        if labels.dtype.kind not in "iu" or labels.ndim != 1:
            raise DataError(
                f"labels are {labels.dtype} of shape {list(labels.shape)}; expected whole numbers, one for each image"
            )
        return torch.from_numpy(labels.astype(np.int64))

    def valid(self, targets: Tensor, classes: int) -> Tensor:
        """From 0 to C - 1."""
        if targets.dtype != torch.int64 or targets.ndim != 1:
            return torch.zeros(len(targets), dtype=torch.bool)
        return (targets >= 0) & (targets < classes)

    def expected(self, classes: int) -> str:
        """As of `ClientTask`."""
        return f"the run has {classes} classes; expected 0 to {classes - 1}"

    def strata(self, targets: Tensor) -> Tensor:
        """The classes."""
        return targets

    def counts(self, targets: Tensor, classes: int) -> Tensor:
        """Examples by class."""
        return targets.bincount(minlength=classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy of logits."""
        return cross_entropy(outputs, targets)

    def predict(self, outputs: Tensor) -> Tensor:
        """Probabilities of the classes."""
        return outputs.softmax(1)

    def scores(self, predictions: Predictions, test: str, trained_on: Tensor, recipe: Recipe) -> dict[str, float]:
        """Accuracies, and by `[evaluation]` what the probabilities say."""
        settings, counted = recipe.evaluation, Tally.of(predictions.outputs, predictions.targets, recipe.classes)
        groups = group_classes(recipe.classes, settings.class_order) if settings.frequency_groups else {}
        values = scores(counted, groups)
        if settings.probabilities:
            values |= probabilistic_scores(counted)
        if settings.clinical:
            values |= clinical_scores(counted, settings.specificity)
        if test == "personal":
            frequencies = trained_on.bincount(minlength=recipe.classes) / max(len(trained_on), 1)
            values |= personal_scores(counted, frequencies)
        if test == "global":
            # Of an evaluator only: `*.local.*` has no bins, which would disclose more of a site's examples.
            values |= reliability(counted) if settings.probabilities else {}
            values["majority"] = majority(counted)
        return values

    def is_nearly_constant(self, outputs: Tensor) -> bool:
        """Whether nearly all examples get one class, whatever the labels are."""
        answers = outputs.argmax(1)  # of numbers that are none, the first class
        return len(answers) - int(answers.bincount().max()) <= 1 + CONSTANT * len(answers)

    def can_be_asked(self, targets: Tensor) -> bool:
        """Whether no class has more than `MAX_MAJORITY` of them."""
        return int(targets.bincount().max()) <= MAX_MAJORITY * len(targets)


CLASSES = ClassificationTask(Classification())


@dataclass(frozen=True, eq=False)
class Tally:
    """A model's predictions on a test set, counted by class; all on the CPU.

    Attributes:
        correct: [C] int64, examples of the class that the model classifies rightly.
        totals: [C] int64, examples of the class; at least one in all.
        logits: [N, C] float32, the model's output: logits or log-probabilities.
        labels: [N] int64.
    """

    correct: Tensor
    totals: Tensor
    logits: Tensor
    labels: Tensor

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, classes: int) -> Tally:
        """Count these outputs [N, C], N > 0; on the CPU, as all of it."""
        correct = labels[logits.argmax(1) == labels]
        correct_by_class, totals = (subset.bincount(minlength=classes) for subset in (correct, labels))
        return cls(correct_by_class, totals, logits, labels)

    @property
    def probabilities(self) -> Tensor:
        """[N, C] float32, made anew: 1, and rounded to it, where the model is confident."""
        return self.logits.softmax(1)


def scores(tally: Tally, groups: Mapping[str, Sequence[int]] | None = None) -> dict[str, float]:
    """Scores of any model; one that is not defined is left out, never 0 or NaN.

    They are `accuracy` (of the global model on the balanced test set: GM), and `recall.<c>` of every class that the
    test set has, with the mean `balanced_accuracy`. With `groups`, as of `group_classes`, there is also the accuracy on
    each group's test examples. `groups` is then the plain mean over the groups, where all have test examples. These are
    FedPRP's Many, Medium, Few and Average.
    """
    present = tally.totals.nonzero().flatten()  # [P] the classes that the test set has
    recalls = tally.correct[present].double() / tally.totals[present]
    values = {
        "accuracy": int(tally.correct.sum()) / int(tally.totals.sum()),
        "balanced_accuracy": float(recalls.mean()),
    }
    values |= {f"recall.{c}": recall for c, recall in zip(present.tolist(), recalls.tolist(), strict=True)}
    return values | _of_groups(tally, groups or {})


def majority(tally: Tally) -> float:
    """The accuracy of always saying the test set's most common class, beside which the model's own is read."""
    return int(tally.totals.max()) / int(tally.totals.sum())


def probabilistic_scores(tally: Tally) -> dict[str, float]:
    """Scores of the probabilities; empty for a model that has diverged to infinities or NaN.

    `auroc` is the macro one-vs-rest area over the classes that the test set has; it is left out where that is one
    class. `ece` is the expected calibration error of the largest probability: l1, 15 bins of equal width that own their
    lower edge.

    Only the columns of the classes that the test set has are ranked, by their log odds against all other C - 1.
    One-vs-rest looks at one column at a time, and a class without examples has no curve. Log odds have the order of the
    probabilities. A confident model has many probabilities of 1 or 0 in float32, which would tie. The calibration is
    that of the event "the prediction is correct", in float64: torchmetrics adds up several classes in float32.
    """
    from torchmetrics.functional.classification import binary_calibration_error, multiclass_auroc  # seconds of imports

    if not (probabilities := tally.probabilities).isfinite().all():
        return {}
    present = tally.totals.nonzero().flatten()  # [P]
    confidence, predicted = probabilities.double().max(1)
    correct = (predicted == tally.labels).long()
    values = {"ece": float(binary_calibration_error(confidence.clamp(max=BELOW_ONE), correct, BINS, "l1"))}
    if len(present) > 1:
        numbers = (tally.totals > 0).cumsum(0) - 1  # [C] a class's column among those that are present
        ranks = _ranks(tally.logits, present)
        values["auroc"] = float(multiclass_auroc(ranks, numbers[tally.labels], len(present)))
    return values


def reliability(tally: Tally) -> dict[str, float]:
    """Accuracy by confidence, in the bins of `ece`: what a reliability diagram draws; empty if the model diverged."""
    if not (probabilities := tally.probabilities).isfinite().all():
        return {}
    confidence, predicted = probabilities.double().max(1)
    return reliability_bins(confidence, predicted == tally.labels)


def clinical_scores(tally: Tally, specificity: float) -> dict[str, float]:
    """What clinicians read of each class against all others, and the Brier score; empty for a model that diverged.

    `brier` is Brier's own, the mean of the squared differences summed over the classes, from 0 to 2. A class that all
    or none of the test set have is left out.
    """
    if not (probabilities := tally.probabilities).isfinite().all():
        return {}
    own = torch.nn.functional.one_hot(tally.labels, len(tally.totals))  # [N, C]
    values = {"brier": float((probabilities.double() - own).square().sum(1).mean())}
    classes = tally.totals.nonzero().flatten()  # [P]
    odds = torch.cat([_log_odds(rows.double())[:, classes] for rows in torch.split(tally.logits, ROWS)])  # [N, P]
    for c, column in zip(classes.tolist(), odds.unbind(1), strict=True):
        found = score_finding(column, own[:, c], specificity)
        values |= {f"class_{name}.{c}": value for name, value in zip(SCORED, found or (), strict=False)}
    return values


def personal_scores(tally: Tally, frequencies: Tensor) -> dict[str, float]:
    """What FedNH adds for a site's own model; `frequencies` [C] are n_{k,c} / n_k of the site's training labels.

    `pm_v` is the accuracy on the test examples of the site's own classes: PM(V)_k. `pm_l` weighs every test example by
    its class's frequency at the site: PM(L)_k. Left out, never 0 or NaN, where the test set has no example of any of
    the site's classes.
    """
    shares = {"pm_v": _share(tally, frequencies > 0), "pm_l": _share(tally, frequencies)}
    return {name: share for name, share in shares.items() if share is not None}


def group_classes(classes: int, order: tuple[int, ...] = ()) -> dict[str, list[int]]:
    """FedPRP's groups: `many`, the first 20 % of the classes, `medium`, the next 30 %, and `few`, all others.

    Both limits are rounded down, so that of fewer than five classes none is in `many`.

    Args:
        order: all classes from the most frequent to the rarest of all sites; 0..C-1 if not given.

    Raises:
        ConfigError: `order` is not each of the classes once.
    """
    ranked = list(order or range(classes))
    if sorted(ranked) != list(range(classes)):
        raise ConfigError(f"the order of classes is {ranked}; expected each of 0 to {classes - 1} once")
    fifth, half = classes // 5, classes // 2
    return {"many": ranked[:fifth], "medium": ranked[fifth:half], "few": ranked[half:]}


def _ranks(logits: Tensor, present: Tensor) -> Tensor:
    """[N, P] float32 in [0, 1), by the classes that are present: equal where the log odds are, and else in their order.

    Args:
        logits: [N, C]; only parts of them are made float64: there may be thousands of classes.
    """
    odds = torch.cat([_log_odds(rows.double())[:, present] for rows in torch.split(logits, ROWS)])  # [N, P]
    return torch.stack([torch.unique(column, return_inverse=True)[1] / len(odds) for column in odds.unbind(1)], 1)


def _log_odds(logits: Tensor) -> Tensor:
    """Log p_c / (1 - p_c) of logits [N, C], as z_c less the logsumexp of all others: a p_c of 1 loses nothing."""
    below, above = (torch.full_like(logits, -torch.inf) for _ in range(2))
    below[:, 1:] = logits[:, :-1].logcumsumexp(1)
    above[:, :-1] = logits[:, 1:].flip(1).logcumsumexp(1).flip(1)
    return logits - torch.logaddexp(below, above)


def _of_groups(tally: Tally, groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
    shares = {name: _share(tally, _members(group, len(tally.totals))) for name, group in groups.items()}
    values = {name: share for name, share in shares.items() if share is not None}
    return values | {"groups": sum(values.values()) / len(values)} if values and len(values) == len(groups) else values


def _members(group: Sequence[int], classes: int) -> Tensor:
    """[C], 1 for the classes of the group, else 0."""
    return torch.zeros(classes).index_fill(0, torch.tensor(group, dtype=torch.int64), 1)


def _share(tally: Tally, weights: Tensor) -> float | None:
    """sum_c w_c correct_c / sum_c w_c T_c for weights [C]; None where there is nothing to divide by."""
    weights = weights.cpu().double()
    total = float(weights @ tally.totals.double())
    return float(weights @ tally.correct.double()) / total if total else None
