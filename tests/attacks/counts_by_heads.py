"""Label counts from one step of a head: its bias moves by predicted less true frequency (Wainakh et al., PoPETs 2022).

A body that answers every image alike, or a step so small that the model stays what it was, makes the prediction known;
what is left is n_c / n, and the whole numbers behind it follow.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from tests.attacks.counts_by_scores import MOST_EXAMPLES
from tests.attacks.hostile_server import always, as_payload, honest_model, public_of, recipe_like, sites_of, updates
from tests.attacks.outcome import Outcome

from protofed.client.models.split import load
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload

Counts = NDArray[np.int64]
SMALLEST_LR = 0.17  # six steps at least on the digits: 1.02 in sum


def blind_body(policy: str) -> Outcome:
    """A body of zeros: all images look alike, and one step over all of them is a histogram. Round 1."""
    recipe = recipe_like("digits-fedavg", model={"name": "mlp", "hidden": [64]}, plan=_one_step(1e-2))
    honest = as_payload(honest_model(recipe))
    blind = {
        Part.BODY: {name: np.zeros_like(tensor) for name, tensor in honest[Part.BODY].items()},
        Part.HEAD: {name: np.zeros_like(tensor) for name, tensor in honest[Part.HEAD].items()},
    }
    return _attacked(policy, recipe, blind)


def tiny_step(policy: str) -> Outcome:
    """An honest model, and a learning rate of next to nothing; the server guesses what the model predicts."""
    recipe = recipe_like("digits-fedavg", plan=_one_step(1e-4))
    return _attacked(policy, recipe, as_payload(honest_model(recipe)), knows_total=True)


def smallest_movement(policy: str) -> Outcome:
    """An honest model, and the smallest movement that standard.toml allows (`limits.min_step_sum`)."""
    recipe = recipe_like("digits-fedavg", plan={**_one_step(SMALLEST_LR), "batch_size": 32, "epochs": 2})
    return _attacked(policy, recipe, as_payload(honest_model(recipe)), knows_total=True)


def _one_step(lr: float) -> dict[str, object]:
    return {"epochs": 1, "batch_size": 10**6, "lr": lr, "momentum": 0.0, "weight_decay": 0.0, "max_grad_norm": None}


def _attacked(policy: str, recipe: Recipe, base: Payload, *, knows_total: bool = False) -> Outcome:
    found = of = answered = 0
    for data in sites_of(recipe):
        truth = np.bincount(data.train.labels.numpy(), minlength=recipe.classes)
        sent = updates(policy, recipe, data, [always(base)])
        of += 1
        if sent:
            answered += 1
            steps = recipe.plan.epochs * math.ceil(len(data.train) / recipe.plan.batch_size)
            moved = (sent[0][Part.HEAD]["bias"] - base[Part.HEAD]["bias"]).astype(np.float64) / recipe.plan.lr / steps
            # Of several steps, on average: between what the model predicted before and what it does after.
            prior = (
                _predicted(recipe, base) if steps == 1 else (_predicted(recipe, base) + _predicted(recipe, sent[0])) / 2
            )
            shares = np.clip(moved + prior, 0, 1)
            found += np.array_equal(_whole(shares, int(truth.sum()) if knows_total else None), truth)
    return Outcome(int(found), of, silent=not answered)


def _predicted(recipe: Recipe, base: Payload) -> NDArray[np.float64]:
    """What the base predicts on average, [C]: on public images."""
    model = honest_model(recipe)
    load(model.body, base[Part.BODY])
    load(model.head, base[Part.HEAD])
    with torch.no_grad():
        images = public_of(recipe).test.normalised(recipe.input)
        return np.asarray(model(images).softmax(1).mean(0).double().numpy())


def _whole(shares: NDArray[np.float64], total: int | None) -> Counts:
    """Whole numbers with these shares: of this total, or of the smallest that fits."""
    if total is not None:
        return np.round(total * shares).astype(np.int64)
    for n in range(1, MOST_EXAMPLES):
        whole = np.round(n * shares)
        if whole.sum() == n and np.abs(n * shares - whole).max() < 0.02:
            return whole.astype(np.int64)
    return np.zeros(len(shares), np.int64)
