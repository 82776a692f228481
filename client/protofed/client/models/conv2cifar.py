"""Conv2Cifar of FedNH (Dai et al., AAAI 2023; released code at 60c3161, `models/CNN.py`; METHODS 1.6)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from protofed.client.models.layers import CONVOLVED, convolutions, embedding
from protofed.client.models.split import SplitModel
from protofed.common.config.recipe import Input


@dataclass(frozen=True)
class Conv2Cifar:
    """Two 5x5 convolutions without padding, two linear layers, no normalisation layer; a head without bias.

    797,952 parameters with 10 classes of 3x32x32 images. Tensor names are the released code's; its `prototype` is the
    head's `weight` here.
    """

    smallest: ClassVar[int] = CONVOLVED

    normalize: bool = False  # unit embedding: the body that the released code runs FedNH with

    def build(self, images: Input, classes: int) -> SplitModel:
        """Body [B, channels, height, width] -> [B, 192], head -> [B, classes]."""
        layers, size = convolutions(images, 64, 64)
        body = nn.Sequential(
            OrderedDict(
                **layers,
                linear1=nn.Linear(size, 384),
                relu3=nn.ReLU(),
                linear2=nn.Linear(384, 192),
                relu4=nn.ReLU(),
                **embedding(192, projection=0, unit=self.normalize),
            )
        )
        return SplitModel(body, nn.Linear(192, classes, bias=False))
