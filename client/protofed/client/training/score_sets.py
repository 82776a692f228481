"""Which scores a site takes of which model, on which test set; `common.protocol.score_names` has their names.

`check` is called before each batch, as of `evaluation.tally`.
"""

from __future__ import annotations

from collections.abc import Callable

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
    model: nn.Module, data: SiteData, recipe: Recipe, prefix: str, check: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """`<prefix>.local.<score>` on the site's own test set; empty where it has none."""
    if data.local_test is None:
        return {}
    return prefixed(f"{prefix}.local", _scores(tally(model, data, data.local_test, check=check), recipe))


def of_personal(
    model: nn.Module, data: SiteData, recipe: Recipe, check: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Scores of the site's own model.

    `personal.<score>`, PM(V) and PM(L) on the shared test set where the site has it, or the run's sample of it, and
    `personal.local.<score>` on its own one, whole.
    """
    local_scores = on_local_test(model, data, recipe, "personal", check)
    if not len(data.test):
        return local_scores
    most = recipe.evaluation.personal_test_images
    predictions = tally(model, data, None if most is None else data.test.sample(most, recipe.seed), check=check)
    shared = _scores(predictions, recipe) | personal_scores(predictions, data.label_frequencies())
    return prefixed("personal", shared) | local_scores


def _scores(predictions: Tally, recipe: Recipe) -> dict[str, float]:
    settings = recipe.evaluation
    groups = groups_of(recipe.classes, settings.class_order) if settings.frequency_groups else {}
    return scores(predictions, groups) | (probabilistic_scores(predictions) if settings.probabilities else {})
