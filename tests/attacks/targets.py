"""The models that are attacked: where their first linear layer is, what it is fed, and what came back of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tests.attacks.hostile_server import honest_model, recipe_like

from protofed.client.data.examples import Examples
from protofed.client.models.split import load
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload

Floats = NDArray[np.float64]
# Relative squared error of a layer's input below which it counts as recovered. Of a perceptron's, the image itself, it
# is a mean squared error of 1e-3 in pixels: at 1e-2 the mean of a class would count, as 28 of 229 digits have another
# one that near.
LIKENESS = 4e-3
SITES = 2  # of the recipe's, which are alike for this purpose
# Within the limits of standard.toml; without momentum, whose sums would only blur what an image adds.
PLAN = {"epochs": 1, "lr": 0.3, "momentum": 0.0, "weight_decay": 0.0}


@dataclass(frozen=True)
class Target:
    """A model whose linear layer has a ReLU behind it."""

    model: Mapping[str, Any]
    layer: str  # of the body
    inputs: Mapping[str, Any] = field(default_factory=dict)  # changes of the recipe's [input]

    def recipe(self, **plan: Any) -> Recipe:
        """FedAvg on the digits with this model."""
        changes = {"input": dict(self.inputs)} if self.inputs else {}
        return recipe_like("digits-fedavg", model=dict(self.model), plan={**PLAN, **plan}, **changes)

    @property
    def weight(self) -> str:
        """[units, D]."""
        return f"{self.layer}.weight"

    @property
    def bias(self) -> str:
        """[units]."""
        return f"{self.layer}.bias"

    def features(self, recipe: Recipe, base: Payload, examples: Examples) -> Floats:
        """What the layer is fed by these images, [N, D]: of a convolutional model an image can be made of it."""
        model = honest_model(recipe)
        load(model.body, base[Part.BODY])
        fed: list[torch.Tensor] = []
        model.body.get_submodule(self.layer).register_forward_hook(lambda _m, given, _out: fed.append(given[0]))
        with torch.no_grad():
            model.body.eval()(examples.normalised(recipe.input))
        return np.asarray(torch.cat(fed).double().numpy())

    def moved(self, base: Payload, sent: Payload) -> tuple[Floats, Floats]:
        """How the layer's rows [units, D] and biases [units] moved."""
        rows, biases = (
            (sent[Part.BODY][name] - base[Part.BODY][name]).astype(np.float64) for name in (self.weight, self.bias)
        )
        return rows, biases


PERCEPTRON = Target({"name": "mlp", "hidden": [1024]}, "linear1")
CONVOLUTIONAL = Target({"name": "fedavg-cnn"}, "fc1", {"shape": [1, 28, 28]})


def over_biases(rows: Floats, biases: Floats) -> Floats:
    """Candidates for a layer's input, [M, D]: of one image's gradient, row over bias is what the layer was fed."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(rows / biases[:, None])


def between_neighbours(rows: Floats, biases: Floats) -> Floats:
    """Likewise of sorted thresholds, [M - 1, D]: two neighbours' movements differ by what is between them."""
    return over_biases(np.diff(rows, axis=0), np.diff(biases))


def recovered(candidates: Floats, truth: Floats) -> int:
    """How many rows of `truth` [N, D] have a candidate [M, D] within `LIKENESS`."""
    known = candidates[np.isfinite(candidates).all(axis=1)]
    if not len(known):
        return 0
    squares = (truth**2).sum(1)[:, None] - 2 * truth @ known.T + (known**2).sum(1)[None]
    return int((squares.min(axis=1) < LIKENESS * (truth**2).sum(1)).sum())
