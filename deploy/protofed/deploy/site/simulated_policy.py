"""Whether the sites of a simulation would take part under a policy: asked before it begins."""

from __future__ import annotations

from pathlib import Path

from protofed.client.policy.policy import Policy
from protofed.common.config.recipe import Recipe
from protofed.common.errors import PolicyViolationError
from protofed.deploy.simulation.simulation import simulated
from protofed.deploy.site.plan import site_plan


def check_simulated(recipe: Recipe, policy: Path) -> None:
    """Check that a site with this policy would take part, as far as that is known without its images.

    Raises:
        PolicyViolationError: there is no such policy, or it refuses the run.
        ConfigError: the recipe cannot be used.
    """
    if refusals := site_plan(recipe, simulated(Policy.read(policy))).refusals:
        raise PolicyViolationError(
            f"under policy {policy.stem} no site takes part in {recipe.name}: {'; '.join(refusals)}. `protofed client "
            f"preview` with this recipe and policy says more; `protofed simulate digits-trio --policy standard` is a "
            "run that a policy of hospitals allows"
        )
