"""Which scores a site takes of each model, on each test set (METHODS §7), all from one pass over it.

The task says what they are (`client.task`); `common.protocol.scores` has their names.

`check` is called before each batch, as of `predict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.task import Predictions
from protofed.client.training.intervals import qualified_scores
from protofed.common.config.recipe import Recipe
from protofed.common.errors import DataError

GLOBAL, PERSONAL, LOCAL = "global", "personal", ".local"  # of which model, and on the site's own test set


def predict(
    model: nn.Module,
    data: SiteData,
    examples: Examples | None = None,
    check: Callable[[], None] = lambda: None,
) -> Predictions:
    """The model's outputs, on its own device and in evaluation mode; its modules' modes are restored.

    Args:
        examples: what to score on, of the run's shape and targets; `data.test` if not given.
        check: called before each batch; what it raises ends the scoring.

    Raises:
        DataError: there are no examples.
    """
    examples = data.test if examples is None else examples
    if not len(examples):
        raise DataError("there are no examples to score a model on; expected at least one")
    device = next((p.device for p in model.parameters()), data.device)
    with _evaluating(model), torch.no_grad():
        outputs = data.computed(lambda images, _: model(images.to(device)), examples, check).float().cpu()  # [N, C]
    return Predictions(outputs, examples.labels.cpu())


def prefixed(prefix: str, scores: Mapping[str, float]) -> dict[str, float]:
    """The same scores as `<prefix>.<name>`, as in `global.accuracy` and `personal.local.accuracy`."""
    return {f"{prefix}.{name}": value for name, value in scores.items()}


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


def on_test(
    model: nn.Module, data: SiteData, recipe: Recipe, check: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """`global.<score>` of the global model on the test set that all sites share; evaluators call it.

    On the site's own one, where it has no other: a trainer that is the evaluator, too.
    """
    examples = data.test if len(data.test) else data.local_test
    predictions = predict(model, data, examples, check=check)
    scores = compute_scores({GLOBAL: predictions}, data, recipe)
    if not recipe.evaluation.qualifiers or examples is None:
        return scores
    return scores | qualified_scores(GLOBAL, predictions, examples, data.task, data.train.labels.cpu(), recipe)


def on_local_test(
    model: nn.Module, data: SiteData, prefix: str, check: Callable[[], None] = lambda: None
) -> dict[str, Predictions]:
    """A model's predictions on the site's own test set, by the prefix of their scores; empty where it has none."""
    if data.local_test is None:
        return {}
    return {f"{prefix}{LOCAL}": predict(model, data, data.local_test, check=check)}


def of_personal(
    model: nn.Module, data: SiteData, recipe: Recipe, check: Callable[[], None] = lambda: None
) -> dict[str, Predictions]:
    """Predictions of the site's own model, by the prefix of their scores.

    `personal` on the shared test set where the site has it, or the run's sample of it, and `personal.local` on its own
    one, whole.
    """
    on_own = on_local_test(model, data, PERSONAL, check)
    if not len(data.test):
        return on_own
    most = recipe.evaluation.personal_test_images
    shared = None if most is None else data.test.sample(most, recipe.seed, data.task.strata)
    return {PERSONAL: predict(model, data, shared, check=check), **on_own}


def compute_scores(predictions: Mapping[str, Predictions], data: SiteData, recipe: Recipe) -> dict[str, float]:
    """`<prefix>.<score>` of predictions by prefix."""
    trained_on, values = data.train.labels.cpu(), dict[str, float]()
    for prefix, predicted in predictions.items():
        values |= prefixed(prefix, data.task.scores(predicted, prefix, trained_on, recipe))
    return values
