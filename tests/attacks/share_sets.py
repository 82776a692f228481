"""Label shares of each of three sites from sums over them: what sites learn from a blind body is not linear in these.

Of a body that answers to all images alike, a fit moves the head's biases b by db/dt = s - softmax(b), s being the
site's shares. Of one fit the sum over three sites tells the mean share and little more; a few fits from biases that
the server chose tell all three s, as a set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import islice, permutations
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares
from scipy.special import expit, softmax
from tests.attacks.hostile_server import (
    MULTI_LABEL,
    always,
    as_payload,
    has,
    honest_model,
    public_of,
    recipe_like,
    sites_of,
    updates,
)
from tests.attacks.policies import NONE
from tests.attacks.sums import mean_of
from tests.attacks.targets import Floats

from protofed.client.data.site_data import SiteData
from protofed.client.models.split import load
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload

SITES, TRIES = 3, 3  # of one sum; starts of the search
STEPS = 40  # of a fit of each of the three
PLAN = {"epochs": 20, "batch_size": 64, "momentum": 0.0, "weight_decay": 0.0, "max_grad_norm": None}


def recipe(rates: float = 4.0, **changes: Any) -> Recipe:
    """A run whose learning rates add up to that in a fit; `standard` allows more, but the body would learn to see."""
    return recipe_like("digits-fedavg", plan={**PLAN, "lr": rates / STEPS}, rounds=1000, **changes)


def dead(body: Payload) -> Payload:
    """No unit behind a convolution answers to any image; no layer is so small that it is refused for that."""
    return _changed(body, 2e-3, -1.0)


def faint(body: Payload, scale: float = 0.1) -> Payload:
    """Every weight of the body is smaller by a factor: its features still differ, but hardly."""
    return _changed(body, scale, None)


def level(run: Recipe, model: Payload, scale: float = 1.0) -> Payload:
    """With features that differ between images, and whose means over a class are all the same, so far as is known."""
    examples, split, seen = public_of(run).test, honest_model(run), list[Floats]()
    load(split.body, model[Part.BODY])
    last = split.body.get_submodule("linear")
    hook = last.register_forward_hook(lambda _, given, __: seen.append(given[0].double().numpy()))
    with torch.no_grad():
        split.eval().body(examples.normalised(run.input))
    hook.remove()
    means = np.stack([seen[0][one].mean(axis=0) for one in has(examples.labels, run.classes).T]) - seen[0].mean(axis=0)
    _, sizes, directions = np.linalg.svd(means, full_matrices=False)
    telling = directions[sizes > 1e-9 * sizes[0]]
    weight = model[Part.BODY]["linear.weight"].astype(np.float64)
    weight = scale * (weight - weight @ telling.T @ telling)
    return {**model, Part.BODY: {**model[Part.BODY], "linear.weight": weight.astype(np.float32)}}


def centred(run: Recipe, model: Payload) -> Payload:
    """With features of mean 0 over the server's own images."""
    mean = features(run, model).mean(axis=0)
    bias = (model[Part.BODY]["linear.bias"] - mean).astype(np.float32)
    return {**model, Part.BODY: {**model[Part.BODY], "linear.bias": bias}}


def features(run: Recipe, model: Payload) -> Floats:
    """Of the server's own images, [N, D]."""
    split = honest_model(run)
    load(split.body, model[Part.BODY])
    with torch.no_grad():
        found: Floats = split.eval().body(public_of(run).test.normalised(run.input)).double().numpy()
    return found


def questions(run: Recipe, body: Payload, number: int) -> list[Payload]:
    """Bases with that body and other biases of the head in each."""
    generator, head = np.random.default_rng(0), as_payload(honest_model(run))[Part.HEAD]
    weight = (0.01 * head["weight"]).astype(np.float32)
    biases = 4 * generator.standard_normal((number, run.classes)).astype(np.float32)
    return [{Part.BODY: body[Part.BODY], Part.HEAD: {"weight": weight, "bias": bias}} for bias in biases]


def group(run: Recipe) -> list[SiteData]:
    """The sites of one sum."""
    return list(islice(sites_of(run), SITES))


def errors(run: Recipe, body: Payload, number: int) -> tuple[float, float]:
    """Of a share, the mean error by so many sums over three sites without rules; and by saying the mean three times."""
    held = group(run)
    assert {run.plan.epochs * math.ceil(len(one.train) / run.plan.batch_size) for one in held} == {STEPS}
    truth = np.stack([has(one.train.labels, run.classes).mean(axis=0) for one in held])
    asked = questions(run, body, number)
    sent = [updates(NONE, run, one, [always(base) for base in asked]) for one in held]
    told = shares_told(run, asked, [mean_of(three) for three in zip(*sent, strict=True)])
    error = _error_by_finding if run.task.name == MULTI_LABEL else _error
    return error(told, truth), error(np.tile(truth.mean(axis=0), (SITES, 1)), truth)


def shares_told(run: Recipe, asked: Sequence[Payload], means: Sequence[Payload]) -> Floats:
    """Shares [3, C] of a group, in no order, from the means of its three updates to these bases.

    With findings, whose sigmoids are of each output alone, the three are in no order for each finding.
    """
    predicted = expit if run.task.name == MULTI_LABEL else partial(softmax, axis=1)
    starts = np.array([base[Part.HEAD]["bias"] for base in asked], dtype=np.float64)
    moved = SITES * (np.array([mean[Part.HEAD]["bias"] for mean in means], dtype=np.float64) - starts)

    def missed(numbers: Floats) -> Floats:
        total = np.zeros_like(starts)
        for shares in predicted(numbers.reshape(SITES, -1)):
            biases = starts
            for _ in range(STEPS):
                biases = biases + run.plan.lr * (shares - predicted(biases))
            total = total + biases - starts
        gap: Floats = (total - moved).ravel()
        return gap

    generator = np.random.default_rng(1)
    found = [least_squares(missed, generator.standard_normal(SITES * run.classes), max_nfev=60) for _ in range(TRIES)]
    told: Floats = predicted(min(found, key=lambda one: float(one.cost)).x.reshape(SITES, -1))
    return told


def _error(told: Floats, truth: Floats) -> float:
    """Mean error of a share, in whichever order the sites come out."""
    return min(float(np.abs(told[list(order)] - truth).mean()) for order in permutations(range(SITES)))


def _error_by_finding(told: Floats, truth: Floats) -> float:
    """Mean error of a finding's three shares, in whichever order they come out."""
    return float(np.abs(np.sort(told, axis=0) - np.sort(truth, axis=0)).mean())


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
