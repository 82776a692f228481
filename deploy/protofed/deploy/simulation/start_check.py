"""What a run is refused for at its start, looked for without starting it: nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import structlog

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError


def check_queue(recipes: Sequence[Recipe], *, known_models: bool) -> None:
    """Queue recipes in memory, as a server does with its ledger; plug-ins are allowed before.

    Args:
        known_models: this machine is the server, which knows its plug-ins; else a model may be one of them.

    Raises:
        ConfigError: one of them cannot be queued.
    """
    from protofed.server.rounds.context import open_server
    from protofed.server.rounds.queue import RunQueue

    with _quietly(), ExitStack() as resources:
        RunQueue(recipes, open_server(None, resources, simulated=not known_models))


def check_simulation(recipe: Recipe, policy: Path | None = None, device: str = "cpu") -> None:
    """Open a simulation in memory, with its data, and let nobody work.

    Raises:
        PolicyViolationError: there is no such policy.
        ConfigError, DataError: recipe, data or device cannot be used, or its sites are too few.
    """
    from protofed.client.device import pick_device
    from protofed.client.policy.policy import Policy
    from protofed.deploy.simulation.simulation import simulation
    from protofed.server.rounds.machine.rules import unmet

    rules = None if policy is None else Policy.read(policy)
    with _quietly(), simulation(recipe, device=pick_device(device), policy=rules) as opened:
        if problems := unmet(recipe, frozenset(opened.data)):
            raise ConfigError(f"recipe '{recipe.name}' has too few sites: {'; '.join(problems)}")


def _quietly() -> ExitStack:
    """Until it is left, only warnings are logged: standard output is the recipe's."""
    stack, before, configured = ExitStack(), structlog.get_config(), structlog.is_configured()
    stack.callback(lambda: structlog.configure(**before) if configured else structlog.reset_defaults())
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    return stack
