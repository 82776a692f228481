"""Images by traps that are to pass the checks of a base: a few units of an honest model are sorted thresholds.

A quarter of a layer's units look along one direction and feed what follows alike; the others, and the norms of all
layers, are the honest model's. Each trap unit fires for many images: it is two neighbours' difference that holds one.
Each row's own noise hides that the rows are twins, and blurs what comes back.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
from tests.attacks.hostile_server import always, as_payload, honest_model, public_of, sites_of, updates
from tests.attacks.outcome import Outcome
from tests.attacks.targets import CONVOLUTIONAL, PERCEPTRON, SITES, Target, between_neighbours, recovered

from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload

SHARE = 0.24  # of the units
NOISES = (0.0, 0.1, 0.3, 0.5)  # lengths beside the common direction's


def perceptron(policy: str) -> Outcome:
    return attack(policy, PERCEPTRON)


def convolutional(policy: str) -> Outcome:
    return attack(policy, CONVOLUTIONAL)


def attack(policy: str, target: Target) -> Outcome:
    """The base of round 2 holds the trap; recovered: images, as the layer is fed them, with the best noise."""
    recipe, best, answered = target.recipe(), 0, 0
    for noise in NOISES:
        found = of = 0
        for data in islice(sites_of(recipe), SITES):
            honest = as_payload(honest_model(recipe))
            trap = trapped(target, recipe, honest, noise)
            sent = updates(policy, recipe, data, [always(honest), always(trap)])
            of += len(data.train)
            if len(sent) == 2:
                answered += 1
                traps = int(SHARE * len(honest[Part.BODY][target.bias]))
                rows, biases = (moved[:traps] for moved in target.moved(trap, sent[1]))
                found += recovered(between_neighbours(rows, biases), target.features(recipe, trap, data.train))
        best = max(best, found)
    return Outcome(best, of, silent=not answered)


def trapped(target: Target, recipe: Recipe, honest: Payload, noise: float) -> Payload:
    """The honest model with `SHARE` of the layer's units as traps, whose rows have the honest rows' norm."""
    inputs = target.features(recipe, honest, public_of(recipe).test)
    body = {name: np.array(tensor) for name, tensor in honest[Part.BODY].items()}
    head = {name: np.array(tensor) for name, tensor in honest[Part.HEAD].items()}
    weight, bias = body[target.weight], body[target.bias]
    traps, generator = int(SHARE * len(bias)), np.random.default_rng(0)
    direction = generator.normal(size=(weight.shape[1],))
    direction = direction / np.linalg.norm(direction)
    own = generator.normal(size=(traps, weight.shape[1]))
    rows = direction + noise * own / np.linalg.norm(own, axis=1, keepdims=True)
    length = float(np.linalg.norm(weight, axis=1).mean())
    weight[:traps] = length * rows
    bias[:traps] = -length * np.quantile(inputs @ direction, np.linspace(0.02, 0.98, traps))
    head["weight"][:, :traps] = head["weight"][:, :1]  # in both targets the head reads the layer itself
    return {Part.BODY: body, Part.HEAD: head}
