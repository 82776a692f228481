"""Label counts from one step of a head: its bias moves by predicted less true frequency (Wainakh et al., PoPETs 2022).

A body that answers every image alike, or a step so small that the model stays what it was, makes the prediction known;
what is left is n_c / n, and the whole numbers behind it follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from tests.attacks.counts_by_scores import MAX_EXAMPLES
from tests.attacks.hostile_server import (
    MULTI_LABEL,
    always,
    as_payload,
    as_task,
    honest_model,
    public_of,
    recipe_like,
    sites_of,
    updates,
)
from tests.attacks.outcome import Outcome
from tests.attacks.policies import limits_of

from protofed.client.data.examples import Examples
from protofed.client.models.split import load
from protofed.client.task import build_client_task
from protofed.common.config.recipe import Recipe
from protofed.common.config.tasks import CLASSIFICATION
from protofed.common.payload import Part, Payload
from protofed.deploy import shipped

Counts = NDArray[np.int64]


def blind_body(policy: str) -> Outcome:
    """A body of zeros: all images look alike, and one step over all of them is a histogram. Round 1."""
    recipe = one_step_recipe(policy)
    return _attacked(policy, recipe, blind_model(recipe))


def one_step_recipe(policy: str) -> Recipe:
    """One step over all examples of a site."""
    return recipe_like("digits-fedavg", model={"name": "mlp", "hidden": [64]}, plan=_one_step(policy, 1e-2))


def blind_model(recipe: Recipe) -> Payload:
    return {
        part: {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
        for part, tensors in as_payload(honest_model(recipe)).items()
    }


def blind_input(policy: str) -> Outcome:
    """An honest model, and an `input.window` that makes all images black: what it predicts of these is known."""
    recipe = recipe_like("digits-fedavg", plan=_least_movement(policy))
    return _attacked(policy, recipe, made=black, knows_total=True)


def tiny_step(policy: str, task: str = CLASSIFICATION) -> Outcome:
    """An honest model, and a learning rate of next to nothing; the server guesses what the model predicts."""
    return _attacked(
        policy, as_task(recipe_like("digits-fedavg", plan=_one_step(policy, 1e-4)), task), knows_total=True
    )


def least_movement(policy: str, task: str = CLASSIFICATION) -> Outcome:
    """An honest model, and the smallest movement that the policy allows (`limits.min_step_sum`)."""
    return _attacked(
        policy, as_task(recipe_like("digits-fedavg", plan=_least_movement(policy)), task), knows_total=True
    )


def tiny_step_of_findings(policy: str) -> Outcome:
    """`tiny_step` on the sigmoids of a multi-label head."""
    return tiny_step(policy, MULTI_LABEL)


def least_movement_of_findings(policy: str) -> Outcome:
    """`least_movement` of the sigmoids of a multi-label head."""
    return least_movement(policy, MULTI_LABEL)


def black(examples: Examples) -> Examples:
    """The same examples, of which nothing is to be seen."""
    return Examples(torch.zeros_like(examples.pixels()), examples.labels)


def _one_step(policy: str, lr: float) -> dict[str, object]:
    """One step over all examples, if the policy allows such batches."""
    batch = min(10**6, limits_of(policy, shipped.recipe("digits-fedavg")).batches[1])
    return {"epochs": 1, "batch_size": batch, "lr": lr, "momentum": 0.0, "weight_decay": 0.0, "max_grad_norm": None}


def _least_movement(policy: str) -> dict[str, object]:
    """As little movement as the policy allows; the digits' smallest site makes six steps of it."""
    if not (least := limits_of(policy, shipped.recipe("digits-fedavg")).min_step_sum):
        return _one_step(policy, 1e-4)
    return {**_one_step(policy, 1.02 * least / 6), "batch_size": 32, "epochs": 2}


def _attacked(
    policy: str,
    recipe: Recipe,
    base: Payload | None = None,
    made: Callable[[Examples], Examples] = lambda examples: examples,
    *,
    knows_total: bool = False,
) -> Outcome:
    """Recovered: sites whose label counts are exact. `made` is what the recipe's input makes of images."""
    base = as_payload(honest_model(recipe)) if base is None else base
    found = of = answered = 0
    for data in sites_of(recipe):
        truth = np.asarray(data.task.counts(data.train.labels, recipe.classes))
        sent = updates(policy, recipe, replace(data, train=made(data.train)), [always(base)])
        of += 1
        if not sent:
            continue
        answered += 1
        shares = shares_told(recipe, base, sent[0], made(public_of(recipe).test), len(data.train))
        found += np.array_equal(whole(shares, len(data.train) if knows_total else None), truth)
    return Outcome(int(found), of, silent=not answered)


def shares_told(recipe: Recipe, base: Payload, sent: Payload, public: Examples, examples: int) -> NDArray[np.float64]:
    """What the head's bias tells of the shares of classes, [C]; by its examples a site's steps are known."""
    steps = recipe.plan.epochs * math.ceil(examples / recipe.plan.batch_size)
    moved = (sent[Part.HEAD]["bias"] - base[Part.HEAD]["bias"]).astype(np.float64) / recipe.plan.lr / steps
    prior = _predicted(recipe, base, public)
    if steps > 1:  # on average between what the model predicted before and what it does after
        prior = (prior + _predicted(recipe, sent, public)) / 2
    return np.clip(moved + prior, 0, 1)


def _predicted(recipe: Recipe, model: Payload, public: Examples) -> NDArray[np.float64]:
    """What a model predicts on average of public images, [C]."""
    built = honest_model(recipe)
    load(built.body, model[Part.BODY])
    load(built.head, model[Part.HEAD])
    with torch.no_grad():
        outputs = built(public.normalised(recipe.input))
        return np.asarray(build_client_task(recipe.task).predict(outputs).mean(0).double().numpy())


def whole(shares: NDArray[np.float64], total: int | None) -> Counts:
    """Whole numbers with these shares: of this total, or of the smallest that fits."""
    if total is not None:
        return np.round(total * shares).astype(np.int64)
    for n in range(1, MAX_EXAMPLES):
        whole = np.round(n * shares)
        if whole.sum() == n and np.abs(n * shares - whole).max() < 0.02:
            return whole.astype(np.int64)
    return np.zeros(len(shares), np.int64)
