"""A multilayer perceptron, for small images and fast tests."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn

from protofed.client.models.split import SplitModel
from protofed.common.config.recipe import Input

Width = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class MLP:
    """Linear layers with ReLU; the last hidden layer is the embedding."""

    smallest: ClassVar[int] = 1

    # At least one: a body without tensors would be a payload without its part.
    hidden: Annotated[tuple[Width, ...], Field(min_length=1)] = (64,)  # width of each layer
    signed: bool = False  # no ReLU after the last hidden layer: two features cover the plane, not a quarter of it
    bias: bool = True  # of the head

    def build(self, images: Input, classes: int) -> SplitModel:
        """Body [B, channels, height, width] -> [B, hidden[-1]], head -> [B, classes]."""
        body = nn.Sequential()
        body.add_module("flatten", nn.Flatten())
        for i, (inputs, outputs) in enumerate(pairwise((prod(images.shape), *self.hidden)), start=1):
            body.add_module(f"linear{i}", nn.Linear(inputs, outputs))
            if i < len(self.hidden) or not self.signed:
                body.add_module(f"relu{i}", nn.ReLU())
        return SplitModel(body, nn.Linear(self.hidden[-1], classes, bias=self.bias))
