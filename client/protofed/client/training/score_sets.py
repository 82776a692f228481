"""Which scores a site takes of which model, on which test set; `common.protocol.score_names` has their names.

`check` is called before each batch, as of `evaluation.tally`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from protofed.client.data.site_data import SiteData
from protofed.client.training.evaluation import (
    Tally,
    groups_of,
    majority,
    personal_scores,
    prefixed,
    probabilistic_scores,
    reliability,
    scores,
    tally,
)
from protofed.common.config.recipe import Recipe
from protofed.common.protocol.score_names import MAJORITY

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


def scores_of(predictions: Mapping[str, Tally], data: SiteData, recipe: Recipe) -> dict[str, float]:
    """`<prefix>.<score>` of predictions by prefix; on the shared test set PM(V) and PM(L), too."""
    found: dict[str, float] = {}
    for prefix, predicted in predictions.items():
        own = personal_scores(predicted, data.label_frequencies()) if prefix == PERSONAL else {}
        found |= prefixed(prefix, _scores(predicted, recipe) | own)
    return found


def _scores(predictions: Tally, recipe: Recipe) -> dict[str, float]:
    settings = recipe.evaluation
    groups = groups_of(recipe.classes, settings.class_order) if settings.frequency_groups else {}
    return scores(predictions, groups) | (probabilistic_scores(predictions) if settings.probabilities else {})
