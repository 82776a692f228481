"""Images from units that hardly any image wakes: a ReLU unit that fires for one image alone learns that image.

Nothing but biases differs from an honest model: the first layer's thresholds are raised to where few public images
reach them. The plan is an honest one.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
from tests.attacks.hostile_server import (
    always,
    as_payload,
    honest_model,
    pixels_of,
    public_of,
    recipe_like,
    sites_of,
    updates,
)
from tests.attacks.outcome import Outcome
from tests.attacks.trap_weights import SITES, Floats, recovered

from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload

UNITS = 512


def all_units(policy: str) -> Outcome:
    """Every unit of the first layer is made rare."""
    return _attacked(policy, 1.0)


def few_units(policy: str) -> Outcome:
    """One unit in ten: whoever looks at the whole layer sees an ordinary one."""
    return _attacked(policy, 0.1)


def _attacked(policy: str, share: float) -> Outcome:
    recipe = recipe_like(
        "digits-fedavg", model={"name": "mlp", "hidden": [UNITS]}, plan={"weight_decay": 0.0, "momentum": 0.0}
    )
    found = of = answered = 0
    for data in islice(sites_of(recipe), SITES):
        # The first base is honest; the second is what the site sent, with raised biases.
        honest = as_payload(honest_model(recipe))
        bases: list[Payload] = []

        def lure(sent: Payload | None, bases: list[Payload] = bases) -> Payload:
            assert sent is not None
            bases.append(raised(recipe, sent, share))
            return bases[-1]

        sent = updates(policy, recipe, data, [always(honest), lure])
        pixels = pixels_of(data)
        of += len(pixels)
        if len(sent) == 2:
            answered += 1
            found += recovered(recipe, rows_over_biases(bases[-1], sent[-1]), pixels)
    return Outcome(found, of, declined=not answered)


def raised(recipe: Recipe, model: Payload, share: float) -> Payload:
    """The model, the biases of a share of its first layer's units such that one public image in 300 wakes them."""
    images = public_of(recipe).test.normalised(recipe.input).flatten(1).numpy()
    body = {name: np.array(tensor) for name, tensor in model[Part.BODY].items()}
    chosen = slice(0, int(share * UNITS))
    reached = np.quantile(images @ body["linear1.weight"][chosen].T, 1 - 1 / 300, axis=0)
    body["linear1.bias"][chosen] = -reached
    return {**model, Part.BODY: body}


def rows_over_biases(base: Payload, sent: Payload) -> Floats:
    """Candidates for images, [units, D]: of a unit with one image, how its row moved over how its bias moved."""
    rows, biases = (
        (sent[Part.BODY][name] - base[Part.BODY][name]).astype(np.float64)
        for name in ("linear1.weight", "linear1.bias")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(rows / biases[:, None])
