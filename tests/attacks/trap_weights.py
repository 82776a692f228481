"""Images from one update: a layer whose units differ only in their thresholds (Fowl et al., ICLR 2022).

All units of the first layer look along one direction, with sorted thresholds. What two neighbours' gradients differ by
is what the images between their thresholds add; of a single image, weight row over bias is that image.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

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


# Noise multipliers at which the site's budget of epsilon = 8, delta = 1e-5 is spent by the attack (PLD accountant):
# one step of all images, 7.7; two rounds of ten steps of a tenth each, 7.5.
NOISE_OF_A_STEP, NOISE_OF_TWO_ROUNDS = 0.62, 0.7
CLIPS = (1e-5, 1e-3, 1e-1, 1.0)  # the server chooses C, too: around the gradient of a single image


def noisy_step(policy: str, noise: float = NOISE_OF_A_STEP) -> Outcome:
    """`one_large_step` on a site that adds noise: the most that is recovered over `CLIPS`."""
    limits = limits_of(policy, PERCEPTRON.recipe())
    plan = {"batch_size": limits.batches[0], "lr": min(1e4, limits.lr), "max_grad_norm": None}
    return _best(policy, {**plan, "dp": {"noise_multiplier": noise, "sampling_rate": 1.0}}, rounds=1)


def noisy_plan(policy: str, noise: float = NOISE_OF_TWO_ROUNDS) -> Outcome:
    """`honest_plan` likewise."""
    plan = {"batch_size": 10, "dp": {"noise_multiplier": noise, "sampling_rate": 0.1}}
    return _best(policy, plan, rounds=2)


def _best(policy: str, plan: dict[str, Any], rounds: int) -> Outcome:
    tried = [PERCEPTRON.recipe(**{**plan, "dp": {**plan["dp"], "max_unit_norm": clip}}) for clip in CLIPS]
    return max((_attacked(policy, recipe, rounds) for recipe in tried), key=lambda outcome: outcome.recovered)


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
