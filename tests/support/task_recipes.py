"""Recipes of each task on the digits, and one of a task of another package."""

from __future__ import annotations

from typing import Any

from protofed.common.config.recipe import Recipe
from protofed.testing.small_recipe import small_recipe

FINDINGS = ("even", "loop", "large")
SETS = {"0": "even|loop", "1": "", "2": "even", "3": "", "4": "even"} | {
    "5": "large",
    "6": "even|loop|large",
    "7": "large",
    "8": "even|loop|large",
    "9": "loop|large",
}
OWN = "tests.client.tasks.own_task:Gauge"
TASKS: dict[str, dict[str, Any]] = {
    "multi-label": {
        "task": {"name": "multi-label"},
        "classes": 3,
        "class_names": FINDINGS,
        "data": {"source": "digits", "label_map": SETS},
    },
    "regression": {
        "task": {"name": "regression", "range": [0, 9]},
        "classes": 1,
        "class_names": ("value",),
        "data": {"source": "digits"},
    },
    "own": {"task": {"name": OWN}, "classes": 1, "class_names": ("value",), "data": {"source": "digits"}},
}


def task_recipe(of: str, method: str = "fedavg", **more: Any) -> Recipe:
    """A run of three sites. It learns in its three rounds."""
    learning = {"epochs": 3, "batch_size": 16, "lr": 0.05, "momentum": 0.9}
    table = {"plan": learning, **TASKS[of], **more}
    table["data"] = {
        **TASKS[of]["data"],
        "partition": {"kind": "dirichlet", "sites": 3, "beta": 1.0},
        **more.get("data", {}),
    }
    return small_recipe(method, **{"rounds": 3, **table})
