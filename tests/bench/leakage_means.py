"""What gradients by class tell of a class's features, and of how many images: the second table of `make leakage`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from tests.bench.attacks import mean_features
from tests.bench.leakage_runs import Case, posed, rounds_of, seeded

from protofed.client.data.site_data import SiteData
from protofed.client.method import client_methods
from protofed.client.models.catalogue import device_model
from protofed.client.models.split import SplitModel
from protofed.client.policy.policy import Policy
from protofed.client.training.context import FitContext
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Array, Payload
from protofed.deploy.simulation.simulation import everything

CASE = Case("digits-creff", {"min_samples_per_class": 10})
ROUNDS = (1, 5, 10, 20)
COLUMNS = ("round", "classes", "images", "cosine with the class mean", "images that it tells of", "of fewer than two")


class Told(NamedTuple):
    """One class of one site in one round.

    Attributes:
        images: that the site has of it.
        cosine: of the features that come back with their true mean.
        effective: images that the gradient is of, (sum w)^2 / sum w^2 for their weights 1 - p_c.
    """

    round: int
    images: int
    cosine: float
    effective: float


def rows(seeds: Sequence[int], rounds: int) -> list[list[str]]:
    """The table's rows: medians over sites and classes."""
    told = [one for seed in seeds for one in _told(seeded(CASE, seed, rounds))]
    made = []
    for number in ROUNDS:
        of_round = [one for one in told if one.round == number]
        if of_round:
            images, cosines, effective = (
                np.array([getattr(one, name) for one in of_round]) for name in ("images", "cosine", "effective")
            )
            medians = [f"{np.median(images):.0f}", f"{np.median(cosines):.2f}", f"{np.median(effective):.1f}"]
            made.append([str(number), str(len(of_round)), *medians, f"{np.mean(effective < 2):.0%}"])
    return made


def _told(recipe: Recipe) -> Iterator[Told]:
    running = posed(recipe, Policy(everything(recipe).rules.model_copy(update=dict(CASE.rules))))
    running.go()
    model = device_model(recipe, torch.device("cpu"), frozenset())
    half = client_methods.build(recipe.method.name, recipe.method.options)
    for number, (sent, received) in enumerate(rounds_of(running), 1):
        for site, payload in sent.items():
            data, base = running.data[site], received[site]
            half.load_global(
                FitContext(site, number, recipe.rounds, model, data, recipe.classes, recipe.plan, _draw(), {}), base
            )
            features, missed = _features(model, data)
            yield from _classes(number, payload, features, missed, data.train.labels.numpy())
    running.ledger.close()


def _classes(number: int, payload: Payload, features: Array, missed: Array, labels: Array) -> Iterator[Told]:
    for c, found in mean_features(payload).items():
        mean, weights = features[labels == c].mean(axis=0), missed[labels == c, c]
        cosine = float(found @ mean / np.linalg.norm(found) / np.linalg.norm(mean))
        yield Told(number, len(weights), cosine, float(weights.sum() ** 2 / (weights**2).sum()))


def _features(model: SplitModel, data: SiteData) -> tuple[Array, Array]:
    """Of all training images, [N, D], and 1 - p of every class, [N, C]."""
    model.eval()
    with torch.no_grad():
        ((images, _),) = data.ordered(data.train, len(data.train))
        features = model.body(images)
        return features.double().numpy(), 1 - model.head(features).double().softmax(1).numpy()


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)
