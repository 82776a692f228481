"""The recipe for tests of methods: seconds of training, on the digits that scikit-learn ships."""

from __future__ import annotations

from protofed.common.config.recipe import Recipe

OPTIONS = {"fednh": {"scale": 1.0}}  # from 20 these few steps diverge, unless gradients are clipped


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
    return Recipe.model_validate({**table, **changes})
