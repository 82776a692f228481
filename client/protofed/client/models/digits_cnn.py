"""A small convolutional network for digits of 8x8 pixels and the like: seconds a run on one CPU core."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn

from protofed.client.models.split import SplitModel
from protofed.common.config.recipe import Input


@dataclass(frozen=True)
class DigitsCNN:
    """Two 3x3 convolutions (16 and 32 channels), each with ReLU and 2x2 max-pooling, then the embedding."""

    smallest: ClassVar[int] = 4  # two poolings

    features: Annotated[int, Field(ge=1)] = 64  # D: size of the embedding

    def build(self, images: Input, classes: int) -> SplitModel:
        """Body [B, channels, height, width] -> [B, features], head (with bias) -> [B, classes]."""
        channels, height, width = images.shape
        body = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(channels, 16, 3, padding=1),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(16, 32, 3, padding=1),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                linear=nn.Linear(32 * (height // 4) * (width // 4), self.features),
                # No ReLU after it: cosine heads have prototypes of both signs, and signed features reach them sooner.
            )
        )
        return SplitModel(body, nn.Linear(self.features, classes))
