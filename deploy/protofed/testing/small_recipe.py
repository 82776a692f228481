"""The recipe on which methods are tested: seconds of training, on data that come with scikit-learn."""

from __future__ import annotations

from protofed.common.config.recipe import Recipe


def small_recipe(method: str, /, **changes: object) -> Recipe:
    """Three rounds of three sites on the digits.

    Args:
        changes: tables in place of its own.
    """
    table: dict[str, object] = {
        "name": f"small-{method}",
        "rounds": 3,
        "classes": 10,
        "input": {"shape": [1, 8, 8]},
        "method": {"name": method},
        "model": {"name": "digits-cnn"},
        "plan": {"epochs": 1, "batch_size": 32, "lr": 0.05, "momentum": 0.9},
        "federation": {"min_sites": 3, "quorum": 1.0, "heartbeat_s": 0.1},
        "data": {
            "source": "digits",
            "partition": {"kind": "dirichlet", "sites": 3, "beta": 0.5},
        },
    }
    return Recipe.model_validate({**table, **changes})
