"""Conv2Cifar of FedNH (Dai et al., AAAI 2023; released code at 60c3161, `models/CNN.py`; METHODS 1.6)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import normalize

from protofed.client.models.split import SplitModel
from protofed.common.recipe import Input


class Unit(nn.Module):
    """Rows divided by their norm; a zero row stays zero. [B, D] -> [B, D]."""

    def forward(self, features: Tensor) -> Tensor:
        """Unit rows, with the `eps` of the released code (1e-12)."""
        return normalize(features, dim=-1)


@dataclass(frozen=True)
class Conv2Cifar:
    """Two 5x5 convolutions without padding, two linear layers, no normalisation layer; a head without bias.

    797,952 parameters with 10 classes of 3x32x32 images. Tensor names are the released code's; its `prototype` is the
    head's `weight` here.
    """

    smallest: ClassVar[int] = 16  # 16 -> 12 -> 6 -> 2 -> 1 pixels a side

    normalize: bool = False  # unit embedding: the body that the released code runs FedNH with

    def build(self, images: Input, classes: int) -> SplitModel:
        """Body [B, channels, height, width] -> [B, 192], head -> [B, classes]."""
        channels, height, width = images.shape
        body = nn.Sequential(
            OrderedDict[str, nn.Module](
                conv1=nn.Conv2d(channels, 64, 5),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(64, 64, 5),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                linear1=nn.Linear(64 * _left(height) * _left(width), 384),
                relu3=nn.ReLU(),
                linear2=nn.Linear(384, 192),
                relu4=nn.ReLU(),
            )
        )
        if self.normalize:
            body.add_module("unit", Unit())
        return SplitModel(body, nn.Linear(192, classes, bias=False))


def _left(side: int) -> int:
    """Pixels a side that are left before the linear layers."""
    return ((side - 4) // 2 - 4) // 2
