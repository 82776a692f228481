"""A recipe's run as a server would offer it, for trials before there is one."""

from __future__ import annotations

from protofed.common.config.recipe import Recipe
from protofed.common.protocol.messages import Assignment
from protofed.server.rounds.machine.rules import min_cohort


def as_offered(recipe: Recipe) -> Assignment:
    """What a site would be given at its enrolling."""
    return Assignment(recipe.name, recipe.wire(), min_cohort=min_cohort(recipe.federation))
