"""FedAvgCNN, the network of cwFedAVG (Lee and Choi, arXiv 2406.07800) and of PFLlib; METHODS 3.3."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from protofed.client.models.layers import CONVOLVED, convolutions
from protofed.client.models.split import SplitModel
from protofed.common.config.recipe import Input


@dataclass(frozen=True)
class FedAvgCNN:
    """Two 5x5 convolutions without padding (32 and 64 channels) and one linear layer; a head with bias.

    582,026 parameters with 10 classes of 1x28x28 images, 878,538 of 3x32x32. The layers `conv1`, `conv2` and `fc1`
    are the released code's; its `fc` is the head here.
    """

    smallest: ClassVar[int] = CONVOLVED

    def build(self, images: Input, classes: int) -> SplitModel:
        """Body [B, channels, height, width] -> [B, 512], head -> [B, classes]."""
        layers, size = convolutions(images, 32, 64)
        body = nn.Sequential(OrderedDict(**layers, fc1=nn.Linear(size, 512), relu3=nn.ReLU()))
        return SplitModel(body, nn.Linear(512, classes))
