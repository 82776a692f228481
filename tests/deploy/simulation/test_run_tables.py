"""What the tables of simulations say of their numbers."""

from __future__ import annotations

from collections.abc import Callable

from protofed.common.config.recipe import Recipe
from protofed.deploy.simulation.run_tables import scores_table

RecipeOf = Callable[..., Recipe]


def test_a_table_says_if_own_models_were_scored_on_a_sample(recipe_of: RecipeOf) -> None:
    sampled, whole = recipe_of("fedavg", evaluation={"personal_test_images": 2000}), recipe_of("fednh")
    assert str(scores_table([sampled, whole], {}, "scores").caption).endswith(
        " Own models: on a stratified sample, at most 2,000, of it."
    )
    assert "sample" not in str(scores_table([whole], {}, "scores").caption)
