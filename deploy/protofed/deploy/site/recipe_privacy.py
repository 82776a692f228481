"""What a recipe's noise is worth, said where PyTorch and the accountant may not be installed: beside a server."""

from __future__ import annotations

from protofed.common.config.recipe import Recipe

NOT_HERE = "what its noise is worth is computed where protofed[client] is installed: `protofed client preview`"


def planned_lines(recipe: Recipe) -> list[str]:
    """The privacy that a run costs each site, in sentences, from its recipe alone; none: it has no noise.

    Raises:
        ConfigError: the recipe's method is unknown, or does not work with noise.
    """
    if recipe.plan.dp is None:
        return []
    try:
        from protofed.deploy.site.plan_privacy import lines, planned

        plan = planned(recipe)
    except ModuleNotFoundError:  # of the extra `client`
        return [NOT_HERE]
    return [] if plan is None else list(lines(plan))
