"""The policies under which every attack is run: those that are shipped, and one that forbids nothing."""

from __future__ import annotations

from protofed.client.privacy.policy import Policy
from protofed.common.config.recipe import Recipe
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import everything, simulated

NONE = "none"  # a policy that allows everything: what the attack is worth where nothing stands in its way
SHIPPED = ("open", "standard", "strict")
POLICIES = (NONE, *SHIPPED)


def policy_of(name: str, recipe: Recipe) -> Policy:
    """A policy by name; a hospital that was asked has approved the run, which is the worst case."""
    if name == NONE:
        return everything(recipe)
    return simulated(Policy.read(shipped.folder("policies") / f"{name}.toml"))
