"""A one-run audit: how much of a fit's membership is told, as a lower bound on its epsilon.

Steinke, Nasr and Jagielski, NeurIPS 2023, Algorithm 1 and Theorem 3.1 (with delta: section 5): of m canaries each is
trained on or not, by a coin; who has the update guesses the coins of those that it is surest of. Under epsilon few of
many guesses can be right but by chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import binom
from tests.support.dp_contexts import with_noise
from torch import Tensor
from torch.nn.functional import cross_entropy

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.models.catalogue import build
from protofed.client.training.context import FitContext
from protofed.client.training.loop import train
from protofed.client.training.noisy_steps import PerExample
from protofed.common.config.recipe import DpPlan, Plan
from protofed.common.config.tables import Input, NamedOptions

CANARIES, OTHERS, CLASSES = 400, 100, 10
GUESSED = 100  # of the surest, half as trained on and half as not
CONFIDENCE = 0.95
CLIP = 0.1  # below what a canary moves: each adds all that it may
DIGITS = Input(shape=(1, 8, 8))


@dataclass(frozen=True)
class Audit:
    """What an audit found."""

    right: int  # guesses that were
    of: int  # all

    def epsilon(self, delta: float) -> float:
        """The lower bound at `CONFIDENCE`: the least epsilon under which so many right guesses are not too unlikely."""
        low, high = 0.0, 50.0
        if self._chance(low, delta) > 1 - CONFIDENCE:
            return 0.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._chance(middle, delta) <= 1 - CONFIDENCE else (low, middle)
        return low

    def _chance(self, epsilon: float, delta: float) -> float:
        """The most that the probability of so many right guesses, or more, can be under (epsilon, delta)."""
        likely = 1 / (1 + math.exp(-epsilon))
        above = binom.sf(np.arange(-1, self.right), self.of, likely)[::-1]  # P(>= right), P(>= right - 1), …, P(>= 0)
        steps = np.arange(1, len(above))
        most = float(((above[1:] - above[0]) / steps).max(initial=0.0))
        return float(above[0]) + 2 * CANARIES * delta * most


def audit(noise_multiplier: float, sampling_rate: float, seed: int = 0) -> Audit:
    """Train once on noise with random labels, and guess by the model's movement, with every canary, as no server."""
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build(NamedOptions(name="digits-cnn"), DIGITS, CLASSES)
    images = torch.rand(CANARIES + OTHERS, 1, 8, 8, generator=draw)
    labels = torch.randint(CLASSES, (CANARIES + OTHERS,), generator=draw)
    inside = torch.rand(CANARIES, generator=draw) < 0.5
    kept = torch.cat((inside, torch.ones(OTHERS, dtype=torch.bool))).nonzero().flatten()
    everything = Examples(images, labels)
    data = SiteData(everything.take(kept), everything, DIGITS, CLASSES)
    gradients = _gradients(everything.normalised(DIGITS)[:CANARIES], labels[:CANARIES], model)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    plan = Plan(batch_size=OTHERS, lr=0.1)
    dp = DpPlan(noise_multiplier=noise_multiplier, sampling_rate=sampling_rate, max_unit_norm=CLIP)
    local = with_noise(FitContext("ann", 1, 1, model, data, CLASSES, plan, draw, {}), dp, seed=str(seed).encode())
    train(local, lambda x, y: cross_entropy(model(x), y))
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    return _guessed(-gradients @ moved, inside)


def _gradients(images: Tensor, labels: Tensor, model: torch.nn.Module) -> Tensor:
    """Directions [m, P] of canaries' gradients, without what all of them share."""
    call = PerExample(model, list(model.parameters()), lambda x, y: cross_entropy(model(x), y))
    rows = torch.cat([gradient.flatten(1) for gradient in call(images, labels)[0]], dim=1)
    rows = rows / rows.norm(dim=1, keepdim=True)
    # Whitened: of what many canaries have, the movement says little about each. A ridge keeps noise from growing.
    gram = rows @ rows.T
    whitened: Tensor = torch.linalg.solve(gram + 1e-2 * gram.diagonal().mean() * torch.eye(len(rows)), rows)
    return whitened


def _guessed(scores: Tensor, inside: Tensor) -> Audit:
    order = scores.argsort(descending=True)
    first, last = order[: GUESSED // 2], order[-(GUESSED // 2) :]
    return Audit(int(inside[first].sum() + (~inside[last]).sum()), GUESSED)
