"""Images from units that hardly any image wakes: a ReLU unit that fires for one image alone learns that image.

Nothing but biases differs from an honest model: thresholds of a linear layer are raised to where few public images
reach them. The plan is an honest one.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
from tests.attacks.hostile_server import always, as_payload, honest_model, public_of, sites_of, updates
from tests.attacks.outcome import Outcome
from tests.attacks.targets import CONVOLUTIONAL, PERCEPTRON, SITES, Target, over_biases, recovered

from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload

RARE = 1 / 300  # of public images


def perceptron(policy: str) -> Outcome:
    return attack(policy, PERCEPTRON, 1.0)


def perceptron_in_part(policy: str) -> Outcome:
    """One unit in ten: whoever looks at the whole layer sees an ordinary one."""
    return attack(policy, PERCEPTRON, 0.1)


def convolutional(policy: str) -> Outcome:
    return attack(policy, CONVOLUTIONAL, 1.0)


def convolutional_in_part(policy: str) -> Outcome:
    return attack(policy, CONVOLUTIONAL, 0.1)


def convolutional_by_class(policy: str) -> Outcome:
    """Likewise, where each class is drawn as often: a class of few images makes as much of an epoch as the others."""
    return attack(policy, CONVOLUTIONAL, 1.0, sampling="class-balanced")


def attack(policy: str, target: Target, share: float, **plan: str) -> Outcome:
    """Recovered: training images, as the layer is fed them, that come back from the update of round 2."""
    recipe = target.recipe(**plan)
    found = of = answered = 0
    for data in islice(sites_of(recipe), SITES):
        # The first base is honest; the second is what the site sent, with raised biases.
        sent = updates(policy, recipe, data, [always(as_payload(honest_model(recipe)))])
        of += len(data.train)
        if not sent:
            continue
        base = raised(target, recipe, sent[0], share)
        sent = updates(policy, recipe, data, [always(as_payload(honest_model(recipe))), always(base)])
        if len(sent) == 2:
            answered += 1
            truth = target.features(recipe, base, data.train)
            found += recovered(over_biases(*target.moved(base, sent[1])), truth)
    return Outcome(found, of, silent=not answered)


def raised(target: Target, recipe: Recipe, model: Payload, share: float) -> Payload:
    """The model, the biases of a share of its layer's units such that one public image in 300 wakes them."""
    inputs = target.features(recipe, model, public_of(recipe).test)
    body = {name: np.array(tensor) for name, tensor in model[Part.BODY].items()}
    weight, bias = body[target.weight], body[target.bias]
    chosen = slice(0, int(share * len(bias)))
    bias[chosen] = -np.quantile(inputs @ weight[chosen].T, 1 - RARE, axis=0)
    return {**model, Part.BODY: body}
