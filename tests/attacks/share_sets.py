"""Label shares of each of three sites from sums over them: what sites learn from a blind body is not linear in these.

Of a body that answers to all images alike, a fit moves the head's biases b by db/dt = s - softmax(b), s being the
site's shares. Of one fit the sum over three sites tells the mean share and little more; a few fits from biases that
the server chose tell all three s, as a set.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from scipy.special import softmax
from tests.attacks.hostile_server import as_payload, honest_model, recipe_like
from tests.attacks.targets import Floats

from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload

SITES, TRIES = 3, 3  # of one sum; starts of the search
PLAN = {"lr": 0.1, "epochs": 20, "batch_size": 64, "momentum": 0.0, "weight_decay": 0.0, "max_grad_norm": None}


def recipe(**changes: Any) -> Recipe:
    """Not as much training as `standard` allows: the body would learn to see."""
    return recipe_like("digits-fedavg", plan=PLAN, rounds=1000, **changes)


def dead(body: Payload) -> Payload:
    """No unit behind a convolution answers to any image; no layer is so small that it is refused for that."""
    return _changed(body, 2e-3, -1.0)


def faint(body: Payload) -> Payload:
    """Every weight of the body is smaller by a factor: its features still differ, but hardly."""
    return _changed(body, 0.1, None)


def questions(run: Recipe, body: Payload, number: int) -> list[Payload]:
    """Bases with that body and other biases of the head in each."""
    generator, head = np.random.default_rng(0), as_payload(honest_model(run))[Part.HEAD]
    weight = (0.01 * head["weight"]).astype(np.float32)
    biases = 4 * generator.standard_normal((number, run.classes)).astype(np.float32)
    return [{Part.BODY: body[Part.BODY], Part.HEAD: {"weight": weight, "bias": bias}} for bias in biases]


def shares_told(run: Recipe, asked: Sequence[Payload], means: Sequence[Payload], steps: int) -> Floats:
    """Shares [3, C] of a group, in no order, from the means of its three updates to these bases.

    Args:
        steps: of a fit.
    """
    starts = np.array([base[Part.HEAD]["bias"] for base in asked], dtype=np.float64)
    moved = SITES * (np.array([mean[Part.HEAD]["bias"] for mean in means], dtype=np.float64) - starts)

    def missed(numbers: Floats) -> Floats:
        total = np.zeros_like(starts)
        for shares in softmax(numbers.reshape(SITES, -1), axis=1):
            biases = starts
            for _ in range(steps):
                biases = biases + run.plan.lr * (shares - softmax(biases, axis=1))
            total = total + biases - starts
        gap: Floats = (total - moved).ravel()
        return gap

    generator = np.random.default_rng(1)
    found = [least_squares(missed, generator.standard_normal(SITES * run.classes), max_nfev=60) for _ in range(TRIES)]
    told: Floats = softmax(min(found, key=lambda one: float(one.cost)).x.reshape(SITES, -1), axis=1)
    return told


def error(told: Floats, truth: Floats) -> float:
    """Mean error of a share, in whichever order the sites come out."""
    return min(float(np.abs(told[list(order)] - truth).mean()) for order in permutations(range(SITES)))


def _changed(model: Payload, scale: float, bias: float | None) -> Payload:
    """With features of about 0, so that the head's weights stay what they are."""
    body = {name: array.copy() for name, array in model[Part.BODY].items()}
    for name, array in body.items():
        if name.endswith("weight"):
            array *= np.float32(scale)
        elif "conv" not in name:
            array.fill(0.0)
        elif bias is not None:
            array.fill(bias)
    return {**model, Part.BODY: body}
