"""Images from one update: a layer whose units differ only in their thresholds (Fowl et al., ICLR 2022).

All units of the first layer look along one direction, with sorted thresholds. What two neighbours' gradients differ by
is what the images between their thresholds add; of a single image, weight row over bias is that image.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
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

from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload

UNITS = 1024
SITES = 2  # of the recipe's, which are alike for this purpose
NOISE = 0.05  # enough that no two rows are copies: their cosine is below 0.999
# Mean squared error of pixels in 0..1 below which an image counts as recovered. At 1e-2 the mean of a class would: 28
# of the 229 digits have another one that near.
LIKENESS = 1e-3
Floats = NDArray[np.float64]


def one_large_step(policy: str) -> Outcome:
    """The server also chooses the plan: one batch of everything, and a learning rate that drowns the old weights."""
    recipe = recipe_like(
        "digits-fedavg",
        model={"name": "mlp", "hidden": [UNITS]},
        plan={"epochs": 1, "batch_size": 10**6, "lr": 1e4, "momentum": 0.0, "weight_decay": 0.0, "max_grad_norm": None},
    )
    return _attacked(policy, recipe, rounds=1)


def plan_within_limits(policy: str) -> Outcome:
    """The plan and the model are those of an honest study; only the weights of round 2 are the attacker's."""
    recipe = recipe_like("digits-fedavg", model={"name": "mlp", "hidden": [UNITS]}, plan={"epochs": 1})
    return _attacked(policy, recipe, rounds=2)


def hidden_in_noise(policy: str) -> Outcome:
    """Likewise, with rows that are no copies of each other: each has noise of its own, beside the common direction."""
    recipe = recipe_like("digits-fedavg", model={"name": "mlp", "hidden": [UNITS]}, plan={"epochs": 1})
    return _attacked(policy, recipe, rounds=2, noise=NOISE)


def _attacked(policy: str, recipe: Recipe, rounds: int, noise: float = 0.0) -> Outcome:
    found = of = answered = 0
    for data in islice(sites_of(recipe), SITES):
        trap = sorted_thresholds(recipe, noise)
        honest = as_payload(honest_model(recipe))
        sent = updates(policy, recipe, data, [always(honest)] * (rounds - 1) + [always(trap)])
        pixels = pixels_of(data)
        of += len(pixels)
        if len(sent) == rounds:
            answered += 1
            found += recovered(recipe, between_neighbours(trap, sent[-1]), pixels)
    return Outcome(found, of, declined=not answered)


def sorted_thresholds(recipe: Recipe, noise: float = 0.0) -> Payload:
    """The trap: one direction, thresholds at the quantiles of public images, and a head by which labels show.

    Args:
        noise: length of each row's own random direction, beside the common one of length 1.
    """
    public = public_of(recipe)
    images = public.test.normalised(recipe.input).flatten(1)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(images.shape[1], generator=generator)
    direction /= direction.norm()
    own = torch.randn(UNITS, images.shape[1], generator=generator)
    rows = direction + noise * own / own.norm(dim=1, keepdim=True)
    levels = torch.quantile(images @ direction, torch.linspace(0, 1, UNITS))
    payload = as_payload(honest_model(recipe))
    weight, bias = payload[Part.BODY]["linear1.weight"], payload[Part.BODY]["linear1.bias"]
    head = 1e-2 * torch.linspace(-1, 1, recipe.classes)
    return {
        Part.BODY: {
            "linear1.weight": rows.numpy().astype(weight.dtype),
            "linear1.bias": (-levels.numpy()).astype(bias.dtype),
        },
        Part.HEAD: {
            "weight": np.repeat(head.numpy()[:, None], UNITS, axis=1).astype(weight.dtype) / UNITS,
            "bias": np.zeros(recipe.classes, weight.dtype),
        },
    }


def between_neighbours(base: Payload, sent: Payload) -> Floats:
    """Candidates for images, [units, D]: what neighbouring rows moved by differs by a weight's share of one image."""
    rows, biases = (
        (sent[Part.BODY][name] - base[Part.BODY][name]).astype(np.float64)
        for name in ("linear1.weight", "linear1.bias")
    )
    steps, heights = rows - np.roll(rows, -1, axis=0), biases - np.roll(biases, -1)
    steps[-1], heights[-1] = rows[-1], biases[-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(steps / heights[:, None])


def recovered(recipe: Recipe, candidates: Floats, pixels: Floats) -> int:
    """How many of the site's images [N, D] in 0..1 have a candidate [M, D], in the model's units, within `LIKENESS`."""
    mean, std = recipe.input.mean[0], recipe.input.std[0]
    guesses = np.clip(np.nan_to_num(candidates) * std + mean, 0, 1)
    errors = ((pixels[:, None, :] - guesses[None]) ** 2).mean(axis=2)  # [N, M]
    return int((errors.min(axis=1) < LIKENESS).sum())
