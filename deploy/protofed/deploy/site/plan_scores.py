"""The scores that a site offers in a run, and which of them its policy lets out, alone or within a sum."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TypeAlias

from protofed.client.policy.policy import Policy
from protofed.client.policy.score_disclosures import is_own
from protofed.common.config.recipe import Recipe
from protofed.common.protocol.score_names import MAJORITY, RELIABILITY, SCORES

LOSS = "after training"  # the rows of names: the models and data that a site's scores are of
OWN, OWN_LOCAL = "own model, shared test set", "own model, own test set"
GLOBAL_LOCAL, GLOBAL = "global model, own test set", "global model, by an evaluator"
_PREFIXES = {OWN: "personal", OWN_LOCAL: "personal.local", GLOBAL_LOCAL: "global.local", GLOBAL: "global"}
_GROUPS, _PROBABILITIES = frozenset({"many", "medium", "few", "groups"}), frozenset({"auroc", "ece"})

ScoreNames: TypeAlias = Mapping[str, tuple[str, ...]]  # by the model and data that they are of


def offered_scores(recipe: Recipe, *, global_model: bool) -> ScoreNames:
    """All that a site of a run offers."""
    evaluation = recipe.evaluation
    left_out = (frozenset() if evaluation.frequency_groups else _GROUPS) | (
        frozenset() if evaluation.probabilities else _PROBABILITIES
    )
    score_names = tuple(name for name in SCORES if name not in left_out)
    models = [OWN, OWN_LOCAL, *([GLOBAL_LOCAL, GLOBAL] if global_model else [])]
    scores = {model: tuple(f"{_PREFIXES[model]}.{name}" for name in score_names) for model in models}
    if global_model:
        scores[GLOBAL] += (MAJORITY, *(sorted(RELIABILITY) if evaluation.probabilities else ()))
    return {LOSS: ("loss",), **scores, OWN: (*scores[OWN], "personal.pm_v", "personal.pm_l")}


def released_scores(offered: ScoreNames, policy: Policy | None, *, secure: bool, noisy: bool) -> ScoreNames:
    """Those of the offered ones that leave by themselves; all that may without a policy."""
    alone = {
        model: [name for name in names if not ((secure or noisy) and is_own(name))] for model, names in offered.items()
    }
    if policy is None:
        return {model: tuple(names) for model, names in alone.items()}
    return {model: tuple(policy.release_scores(dict.fromkeys(names, 0.0)).scores) for model, names in alone.items()}


def summed_scores(offered: ScoreNames, policy: Policy | None, *, secure: bool, noisy: bool, mixes: bool) -> ScoreNames:
    """Those of the offered ones that leave within a secure sum alone; none in a run without.

    Args:
        mixes: the own model is one that no sum has scores of, as `Declaration.mixes_classes`.
    """
    if not secure:
        return dict.fromkeys(offered, ())
    hidden = {OWN, OWN_LOCAL} if mixes else set()
    own = {
        model: [name for name in names if is_own(name) and not noisy and model not in hidden]
        for model, names in offered.items()
    }
    if policy is None:
        return {model: tuple(names) for model, names in own.items()}
    flags = {model: policy.release_score_sum(dict.fromkeys(names, 0.0), names).flags() for model, names in own.items()}
    return {model: tuple(itertools.compress(names, flags[model])) for model, names in own.items()}
