"""The simple CNN of MOON (Li et al., CVPR 2021) and FedProc (Mu et al., 2021); METHODS 4.2 and 4.3."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn

from protofed.client.models.layers import CONVOLVED, convolutions, embedding
from protofed.client.models.split import SplitModel
from protofed.common.config.recipe import Input


@dataclass(frozen=True)
class SimpleCNN:
    """Two 5x5 convolutions without padding (6 and 16 channels), two linear layers, a projection; a head with bias.

    92,626 parameters with 10 classes of 3x32x32 images. Tensor names are the released code's, which has those before
    `l1` in `features`; its `l3` is the head here.
    """

    smallest: ClassVar[int] = CONVOLVED

    projection: Annotated[int, Field(ge=0)] = 256  # Q: size of the embedding; 0: no projection, an embedding of 84
    normalize: bool = False  # unit embedding: FedProc's released code; MOON's has none

    def build(self, images: Input, classes: int) -> SplitModel:
        """Body [B, channels, height, width] -> [B, projection or 84], head -> [B, classes]."""
        layers, size = convolutions(images, 6, 16)
        body = nn.Sequential(
            OrderedDict(
                **layers,
                fc1=nn.Linear(size, 120),
                relu3=nn.ReLU(),
                fc2=nn.Linear(120, 84),
                relu4=nn.ReLU(),
                **embedding(84, self.projection, self.normalize),
            )
        )
        return SplitModel(body, nn.Linear(self.projection or 84, classes))
