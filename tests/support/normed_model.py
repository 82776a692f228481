"""A small model with batch normalisation, for images of any size."""

from __future__ import annotations

import math

import torch
from torch import nn

from protofed.client.models.split import SplitModel
from protofed.common.config.tables import Input

NAME = "tests.support.normed_model:normed"


def normed(input_: Input, classes: int) -> SplitModel:
    """A layer of 16 units."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_.shape), 16), nn.BatchNorm1d(16), nn.ReLU())
    return SplitModel(body, nn.Linear(16, classes))


def seeded(input_: Input, classes: int, seed: int = 3) -> SplitModel:
    """The same, with weights by a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return normed(input_, classes)
