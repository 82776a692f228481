"""The policies under which every attack is run: those that are shipped, and some that allow more.

The attacks are on runs without secure aggregation, which `standard` and `strict` decline; their other rules are seen
where `secure = "allowed"`.
"""

from __future__ import annotations

from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import Limits
from protofed.common.config.recipe import Recipe
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import everything, simulated

NONE = "none"  # a policy that allows everything: what the attack is worth where nothing stands in its way
SHIPPED = ("open", "standard", "strict")
UPDATES = "standard, secure = allowed"  # under which runs without secure aggregation goes on
PERCEPTRONS = "standard, perceptrons allowed"  # likewise, and its list of models stands in no attack's way
POLICIES = (NONE, *SHIPPED, UPDATES, PERCEPTRONS)


def limits_of(name: str, recipe: Recipe) -> Limits:
    """What a server may ask under a policy: an attacker asks for as much as that, where more would be declined."""
    return policy_of(name, recipe).rules.limits


def policy_of(name: str, recipe: Recipe) -> Policy:
    """A policy by name; a hospital that was asked has approved the run, which is the worst case."""
    if name == NONE:
        return everything(recipe)
    policy = simulated(Policy.read(shipped.folder("policies") / f"{name.partition(',')[0]}.toml"))
    if name not in (UPDATES, PERCEPTRONS):
        return policy
    limits = policy.rules.limits
    if name == PERCEPTRONS:
        limits = limits.model_copy(update={"models": limits.models | {"mlp"}})
    return Policy(policy.rules.model_copy(update={"secure": "allowed", "limits": limits}))
