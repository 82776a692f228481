"""A run's first model, as every site builds it from the recipe's seed."""

from __future__ import annotations

import torch

from protofed.client.models.catalogue import first
from protofed.client.models.split import dump
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload


def first_model(recipe: Recipe, plugins: frozenset[str]) -> Payload:
    """BODY and HEAD, drawn on the CPU from the seed: the same on every site, and nothing of any site's data.

    A pre-trained body is read from the site's own copy of it, by its digest in the recipe.

    Args:
        plugins: those that the site's policy lists.

    Raises:
        ConfigError: the recipe's model cannot be built, or this site has not its pre-trained body.
    """
    with torch.random.fork_rng():  # the global generator also serves the site's own layers
        torch.manual_seed(recipe.seed)
        model = first(recipe, plugins)
    return {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}
