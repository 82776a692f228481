"""The recipe for tests of methods: seconds of training, on the digits that scikit-learn ships."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protofed.common import plugins
from protofed.common.config.recipe import Recipe
from protofed.server.method import server_methods

# FedNH diverges in these few steps from a scale of 20 unless gradients are clipped; the others' defaults take seconds.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "fednh": {"scale": 1.0},
    "creff": {"match_epochs": 10, "crt_epochs": 30},
    "fedbabu": {"finetune_epochs": 2},
    "fedic": {"steps": 10},
    "fedrep": {"head_epochs": 2},
}
AUXILIARY = 5  # images of each class for the evaluator of a method that refines models


def small_recipe(method: str, /, **changes: object) -> Recipe:
    """Three rounds of three sites on the digits.

    Args:
        changes: top-level keys and tables that replace the recipe's own.
    """
    table: dict[str, object] = {
        "name": f"small-{method}",
        "rounds": 3,
        "classes": 10,
        "input": {"shape": [1, 8, 8]},
        "method": {"name": method, **OPTIONS.get(method, {})},
        "model": {"name": "digits-cnn"},
        "plan": {"epochs": 1, "batch_size": 32, "lr": 0.05, "momentum": 0.9},
        "federation": {"min_sites": 3, "quorum": 1.0, "heartbeat_s": 0.1},
        "data": {
            "source": "digits",
            "partition": {"kind": "dirichlet", "sites": 3, "beta": 0.5},
        },
    }
    table |= changes
    if isinstance(table["data"], dict) and _refines(method):
        table["data"] = {"auxiliary_per_class": AUXILIARY, **table["data"]}
    return Recipe.model_validate(table)


def _refines(method: str) -> bool:
    """Whether an evaluator refines the method's models; a plug-in that may not be loaded yet does not."""
    known = method in set(server_methods) or plugins.is_allowed(method)
    return known and hasattr(server_methods.get(method), "refined")
