"""The policies under which every attack is run: those that are shipped, and one that forbids nothing."""

from __future__ import annotations

from protofed.client.privacy.limits import Limits
from protofed.client.privacy.policy import Policy
from protofed.common.config.recipe import Recipe
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import everything, simulated

NONE = "none"  # a policy that allows everything: what the attack is worth where nothing stands in its way
SHIPPED = ("open", "standard", "strict")
PERCEPTRONS = "standard, perceptrons allowed"  # whose list of models stands in no attack's way
POLICIES = (NONE, *SHIPPED, PERCEPTRONS)


def limits_of(name: str, recipe: Recipe) -> Limits:
    """What a server may ask under a policy: an attacker asks for as much as that, where more would be declined."""
    return policy_of(name, recipe).rules.limits


def policy_of(name: str, recipe: Recipe) -> Policy:
    """A policy by name; a hospital that was asked has approved the run, which is the worst case."""
    if name == NONE:
        return everything(recipe)
    policy = simulated(Policy.read(shipped.folder("policies") / f"{name.partition(',')[0]}.toml"))
    if name != PERCEPTRONS:
        return policy
    limits = policy.rules.limits.model_copy(update={"models": policy.rules.limits.models | {"mlp"}})
    return Policy(policy.rules.model_copy(update={"limits": limits}))
