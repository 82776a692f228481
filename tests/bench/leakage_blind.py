"""How blind a body may be before sums of fits on it tell the label shares of each site: a table of `make leakage`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.attacks import share_sets
from tests.attacks.hostile_server import as_payload, honest_model

from protofed.common.config.recipe import Recipe
from protofed.common.payload import Payload

RATES = (1.0, 1.5, 2.0, 4.0)  # what a fit's learning rates add up to
SUMS = 60
COLUMNS = ("body", "variance of the features", *(f"error, rates of {rates:g}" for rates in RATES), "mean, thrice")


def _bodies(run: Recipe) -> dict[str, Callable[[Payload], Payload]]:
    """The built body's weights times a factor; and its last layer's, of features that tell nothing of classes."""
    weights = {f"weights x {scale:g}": partial(share_sets.faint, scale=scale) for scale in (0.3, 0.5, 0.6, 0.7, 0.8, 1)}
    levels = {f"level x {scale:g}": partial(share_sets.level, run, scale=scale) for scale in (0.5, 0.75, 1)}
    return {**weights, **levels}


def rows() -> list[list[str]]:
    """One for each body: the features' variance beside the built model's, and the mean error of a share."""
    made = []
    for name in _bodies(share_sets.recipe()):
        found = []
        for rates in RATES:
            run = share_sets.recipe(rates)
            first = as_payload(honest_model(run))
            body = share_sets.centred(run, _bodies(run)[name](first))
            variance = (
                share_sets.features(run, body).var(axis=0).sum() / share_sets.features(run, first).var(axis=0).sum()
            )
            found.append(share_sets.errors(run, body, SUMS))
        errors = [f"{told:.3f}" for told, _ in found]
        made.append([name, f"{variance:.2g}", *errors, f"{found[0][1]:.3f}"])
    return made
