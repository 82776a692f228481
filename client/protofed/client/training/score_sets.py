"""Which scores a site takes of which model, on which test set, and how they are named."""

from __future__ import annotations

from torch import nn

from protofed.client.data.site_data import SiteData
from protofed.client.training.evaluation import (
    Tally,
    groups_of,
    personal_scores,
    prefixed,
    probabilistic_scores,
    reliability,
    scores,
    tally,
)
from protofed.common.config.recipe import Recipe

SCORES = ("accuracy", "balanced_accuracy", "recall", "auroc", "ece", "many", "medium", "few", "groups")
TESTS = ("global", "personal", "global.local", "personal.local")
RELIABILITY = frozenset(f"global.reliability.{name}" for name in ("accuracy", "confidence", "share"))
SCALARS = RELIABILITY | {"loss", "personal.pm_v", "personal.pm_l"} | {f"{of}.{name}" for of in TESTS for name in SCORES}


def on_test(model: nn.Module, data: SiteData, recipe: Recipe) -> dict[str, float]:
    """`global.<score>`: the global model on the test set that all sites share; for an evaluator."""
    told = tally(model, data)
    bins = reliability(told) if recipe.evaluation.probabilities else {}  # of a site's own set they would tell more
    return prefixed("global", _scores(told, recipe) | bins)


def on_local_test(model: nn.Module, data: SiteData, recipe: Recipe, prefix: str) -> dict[str, float]:
    """`<prefix>.local.<score>`: on the site's own test set; nothing where there is none."""
    if data.local_test is None:
        return {}
    return prefixed(f"{prefix}.local", _scores(tally(model, data, data.local_test), recipe))


def of_personal(model: nn.Module, data: SiteData, recipe: Recipe) -> dict[str, float]:
    """`personal.<score>` on the shared test set, with PM(V) and PM(L), and `personal.local.<score>` on the own one."""
    own = on_local_test(model, data, recipe, "personal")
    if not len(data.test):
        return own
    told = tally(model, data)
    shared = _scores(told, recipe) | personal_scores(told, data.label_frequencies())
    return prefixed("personal", shared) | own


def _scores(told: Tally, recipe: Recipe) -> dict[str, float]:
    asked = recipe.evaluation
    groups = groups_of(recipe.classes, asked.class_order) if asked.frequency_groups else {}
    return scores(told, groups) | (probabilistic_scores(told) if asked.probabilities else {})
