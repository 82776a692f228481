"""Images from one update: a layer whose units differ only in their thresholds (Fowl et al., ICLR 2022).

All units of the first layer look along one direction, with sorted thresholds. What two neighbours' gradients differ by
is what the images between their thresholds add; of a single image, weight row over bias is that image.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
from tests.attacks.hostile_server import always, as_payload, honest_model, public_of, sites_of, updates
from tests.attacks.outcome import Outcome
from tests.attacks.policies import limits_of
from tests.attacks.targets import PERCEPTRON, SITES, between_neighbours, recovered

from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload


def one_large_step(policy: str) -> Outcome:
    """The server also chooses the plan: one batch of everything, and a learning rate that drowns the old weights."""
    limits = limits_of(policy, PERCEPTRON.recipe())
    plan = {"batch_size": min(10**6, limits.batches[1]), "lr": min(1e4, limits.lr), "max_grad_norm": None}
    return _attacked(policy, PERCEPTRON.recipe(**plan), rounds=1)


def honest_plan(policy: str) -> Outcome:
    """The plan and the model are those of an honest study; only the weights of round 2 are the attacker's."""
    return _attacked(policy, PERCEPTRON.recipe(), rounds=2)


def _attacked(policy: str, recipe: Recipe, rounds: int) -> Outcome:
    found = of = answered = 0
    honest, trap = as_payload(honest_model(recipe)), sorted_thresholds(recipe)
    for data in islice(sites_of(recipe), SITES):
        sent = updates(policy, recipe, data, [always(honest)] * (rounds - 1) + [always(trap)])
        of += len(data.train)
        if len(sent) == rounds:
            answered += 1
            truth = PERCEPTRON.features(recipe, trap, data.train)
            found += recovered(between_neighbours(*PERCEPTRON.moved(trap, sent[-1])), truth)
    return Outcome(found, of, silent=not answered)


def sorted_thresholds(recipe: Recipe) -> Payload:
    """The trap: one direction, thresholds at the quantiles of public images, and a head by which labels show."""
    honest = as_payload(honest_model(recipe))
    inputs = PERCEPTRON.features(recipe, honest, public_of(recipe).test)
    weight, bias = honest[Part.BODY][PERCEPTRON.weight], honest[Part.BODY][PERCEPTRON.bias]
    direction = np.random.default_rng(0).normal(size=(weight.shape[1],))
    direction = direction / np.linalg.norm(direction)
    levels = np.quantile(inputs @ direction, np.linspace(0, 1, len(bias)))
    labels = 1e-2 * np.linspace(-1, 1, recipe.classes) / len(bias)
    return {
        Part.BODY: {
            PERCEPTRON.weight: np.tile(direction, (len(weight), 1)).astype(weight.dtype),
            PERCEPTRON.bias: (-levels).astype(bias.dtype),
        },
        Part.HEAD: {
            "weight": np.repeat(labels[:, None], len(bias), axis=1).astype(weight.dtype),
            "bias": np.zeros(recipe.classes, weight.dtype),
        },
    }
