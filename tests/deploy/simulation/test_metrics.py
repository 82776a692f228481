"""A simulation counts as a server does, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY

from protofed.common.config.recipe import Recipe
from protofed.deploy.simulation.simulation import simulation


def test_a_simulation_counts_for_itself(recipe_of: Callable[..., Recipe]) -> None:
    def counted(metrics: Any, name: str, **labels: str) -> float | None:
        found: float | None = metrics.registry.get_sample_value(f"protofed_{name}", labels)
        return found

    with simulation(recipe_of("fednh")) as running, simulation(recipe_of("fedavg")) as other:
        running.go()
        metrics = running.runs._context.metrics
        accepted, rounds = len(running.ledger.updates(running.recipe.name)), running.ledger.rounds(running.recipe.name)
        assert (
            counted(metrics, "updates_total", verdict="accepted", reason="") == accepted == 2 + 9
        )  # first models, updates
        assert counted(metrics, "rounds_total", outcome="committed") == len(rounds) == 4
        assert counted(metrics, "round_seconds_sum", phase="collecting") == 0  # time stands still
        assert counted(other.runs._context.metrics, "rounds_total", outcome="committed") == 0
        figures = [row.statistics for row in rounds]
    assert "prototype_shift" not in figures[0]
    assert all(found["classes_covered"] == 10 and found["prototype_shift"] > 0 for found in figures[1:])
    assert not [family.name for family in REGISTRY.collect() if family.name.startswith("protofed")]
