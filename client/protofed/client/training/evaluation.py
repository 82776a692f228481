"""Scores of a model on a test set (METHODS §7), all from one pass over it.

It says which scores a site takes of each model, on each test set; `common.protocol.scores` has their names.

`check` is called before each batch, as of `evaluation.tally`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, DataError
from protofed.common.protocol.scores import BINS, MAJORITY

ROWS = 1024  # of logits that are in float64 at a time
BELOW_ONE = 1 - 2**-53  # the largest confidence of the last bin: torchmetrics gives exactly 1 a bin of its own


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

    def of_some(self, rows: Tensor) -> Tally:
        """The predictions on the examples of a mask [N] bool, which has one."""
        return Tally.of(self.logits[rows], self.labels[rows], len(self.totals))

    @property
    def probabilities(self) -> Tensor:
        """[N, C] float32, made anew: 1, and rounded to it, where the model is confident."""
        return self.logits.softmax(1)


def tally(
    model: nn.Module,
    data: SiteData,
    examples: Examples | None = None,
    check: Callable[[], None] = lambda: None,
) -> Tally:
    """The model's predictions, on its own device and in evaluation mode; its modules' modes are restored.

    Args:
        examples: what to score on, of the run's shape and classes; `data.test` if not given.
        check: called before each batch; what it raises ends the scoring.

    Raises:
        DataError: there are no examples.
    """
    examples = data.test if examples is None else examples
    if not len(examples):
        raise DataError("there are no examples to score a model on; expected at least one")
    device = next((p.device for p in model.parameters()), data.device)
    with _evaluating(model), torch.no_grad():
        logits = data.computed(lambda images, _: model(images.to(device)), examples, check).float().cpu()  # [N, C]
    return Tally.of(logits, examples.labels.cpu(), data.classes)


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
    """Accuracy by confidence, in the bins of `ece`: what a reliability diagram draws.

    For the predictions in bin b, `reliability.accuracy.<b>` is the share that is correct, and `.confidence.<b>` the
    mean largest probability. `.share.<b>` is the bin's share of all predictions. Empty bins are left out. Empty for a
    model that has diverged. The sum over b of share |accuracy - confidence| is `ece`.
    """
    if not (probabilities := tally.probabilities).isfinite().all():
        return {}
    confidence, predicted = probabilities.double().max(1)
    bins = (confidence.clamp(max=BELOW_ONE) * BINS).long()  # [N]
    values: dict[str, float] = {}
    for b in sorted(set(bins.tolist())):
        in_bin = bins == b
        values[f"reliability.accuracy.{b}"] = float((predicted == tally.labels)[in_bin].double().mean())
        values[f"reliability.confidence.{b}"] = float(confidence[in_bin].mean())
        values[f"reliability.share.{b}"] = float(in_bin.double().mean())
    return values


def personal_scores(tally: Tally, frequencies: Tensor) -> dict[str, float]:
    """What FedNH adds for a site's own model; `frequencies` [C] are n_{k,c} / n_k of the site's training labels.

    `pm_v` is the accuracy on the test examples of the site's own classes: PM(V)_k. `pm_l` weighs every test example by
    its class's frequency at the site: PM(L)_k. Left out, never 0 or NaN, where the test set has no example of any of
    the site's classes.
    """
    shares = {"pm_v": _share(tally, frequencies > 0), "pm_l": _share(tally, frequencies)}
    return {name: share for name, share in shares.items() if share is not None}


def prefixed(prefix: str, scores: Mapping[str, float]) -> dict[str, float]:
    """The same scores as `<prefix>.<name>`, as in `global.accuracy` and `personal.local.accuracy`."""
    return {f"{prefix}.{name}": value for name, value in scores.items()}


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


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module is in its own former mode, as a method may have frozen some of them."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


PERSONAL = "personal"  # prefix of the scores of a site's own model on the shared test set


def on_test(
    model: nn.Module, data: SiteData, recipe: Recipe, check: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """`global.<score>` of the global model on the test set that all sites share; evaluators call it.

    On the site's own one, where it has no other: a trainer that is the evaluator, too.
    """
    predictions = tally(model, data, None if len(data.test) else data.local_test, check=check)
    # Of an evaluator only: `*.local.*` has no bins, which would disclose more of a site's examples.
    bins = reliability(predictions) if recipe.evaluation.probabilities else {}
    return prefixed("global", _scores(predictions, recipe) | bins) | {MAJORITY: majority(predictions)}


def on_local_test(
    model: nn.Module, data: SiteData, prefix: str, check: Callable[[], None] = lambda: None
) -> dict[str, Tally]:
    """A model's predictions on the site's own test set, by the prefix of their scores; empty where it has none."""
    if data.local_test is None:
        return {}
    return {f"{prefix}.local": tally(model, data, data.local_test, check=check)}


def of_personal(
    model: nn.Module, data: SiteData, recipe: Recipe, check: Callable[[], None] = lambda: None
) -> dict[str, Tally]:
    """Predictions of the site's own model, by the prefix of their scores.

    `personal` on the shared test set where the site has it, or the run's sample of it, and `personal.local` on its own
    one, whole.
    """
    on_own = on_local_test(model, data, PERSONAL, check)
    if not len(data.test):
        return on_own
    most = recipe.evaluation.personal_test_images
    on_shared = tally(model, data, None if most is None else data.test.sample(most, recipe.seed), check=check)
    return {PERSONAL: on_shared, **on_own}


def compute_scores(predictions: Mapping[str, Tally], data: SiteData, recipe: Recipe) -> dict[str, float]:
    """`<prefix>.<score>` of predictions by prefix; on the shared test set PM(V) and PM(L), too."""
    values: dict[str, float] = {}
    for prefix, predicted in predictions.items():
        own = personal_scores(predicted, data.label_frequencies()) if prefix == PERSONAL else {}
        values |= prefixed(prefix, _scores(predicted, recipe) | own)
    return values


def _scores(predictions: Tally, recipe: Recipe) -> dict[str, float]:
    settings = recipe.evaluation
    groups = group_classes(recipe.classes, settings.class_order) if settings.frequency_groups else {}
    return scores(predictions, groups) | (probabilistic_scores(predictions) if settings.probabilities else {})
