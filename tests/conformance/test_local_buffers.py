"""The suite that every method passes, on a model with batch normalisation whose statistics stay the sites' own.

Restarts, roll-backs, workers, gRPC: the statistics are part of a site's memory, and come back with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from tests.support.normed_model import NAME

from protofed.common.config.recipe import Recipe
from protofed.common.protocol.scores import spreads
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import simulation
from protofed.testing import conformance
from protofed.testing.conformance import MethodConformance
from protofed.testing.small_recipe import small_recipe

PLAN = {"epochs": 1, "batch_size": 32, "lr": 0.05, "momentum": 0.9}
TABLES: dict[str, Any] = {"model": {"name": NAME}, "plan": {**PLAN, "buffers": "local"}}


class TestLocalBuffers(MethodConformance):
    """By FedPer, whose sites predict with what they install: the global body, on their own statistics."""

    name = "fedper"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def normed(cls) -> Iterator[None]:
        """The suite's small recipe, with that model."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(conformance, "small_recipe", partial(small_recipe, **TABLES))
            yield

    @pytest.fixture
    def recipe(self, method: str) -> Recipe:
        """The shipped recipe, with that model."""
        table = shipped.recipe(f"digits-{method}").model_dump()
        return Recipe.model_validate(
            {**table, "model": TABLES["model"], "plan": {**table["plan"], "epochs": 5, "buffers": "local"}}
        )


def scores_by(buffers: str) -> dict[str, float]:
    recipe = small_recipe("fedper", model={"name": NAME}, plan={**PLAN, "buffers": buffers})
    with simulation(recipe) as running:
        running.go()
        last = spreads(running.ledger.scores(recipe.name)[recipe.rounds])
    return {name: spread.mean for name, spread in last.items()}


def test_sites_own_scores_are_taken_with_their_own_statistics() -> None:
    assert scores_by("local") != scores_by("averaged")
