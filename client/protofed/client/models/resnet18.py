"""ResNet-18 (He et al., CVPR 2016) as torchvision builds it, with a stem and a normalisation for federations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn
from torchvision.models import resnet18

from protofed.client.models.split import SplitModel
from protofed.common.recipe import Input


@dataclass(frozen=True)
class ResNet18:
    """Blocks and tensor names of torchvision; the defaults are FedNH's for TinyImageNet (METHODS 1.6).

    GroupNorm is the default because it has no running statistics, which differ from site to site under skew. (FedNH
    itself, unlike its baselines, was run there without most of its normalisation layers: not offered here.)
    """

    smallest: ClassVar[int] = 1

    stem: Literal["small", "imagenet"] = "small"  # 3x3 of stride 1 without max-pooling; or 7x7 of stride 2 with it
    norm: Literal["group", "batch"] = "group"
    groups: Literal[1, 2, 4, 8, 16, 32, 64] = 2  # of GroupNorm; each divides every layer's channels
    bias: bool = False  # of the head

    def build(self, images: Input, classes: int) -> SplitModel:
        """Body [B, channels, height, width] -> [B, 512], head -> [B, classes]."""
        net: Any = resnet18(weights=None, norm_layer=self._norm)
        net.conv1 = self._stem(images.shape[0])
        if self.stem == "small":
            net.maxpool = nn.Identity()
        net.fc = nn.Identity()  # the head is ours
        return SplitModel(net, nn.Linear(512, classes, self.bias))

    def _norm(self, channels: int) -> nn.Module:
        return nn.GroupNorm(self.groups, channels) if self.norm == "group" else nn.BatchNorm2d(channels)

    def _stem(self, channels: int) -> nn.Conv2d:
        kernel, stride = (3, 1) if self.stem == "small" else (7, 2)
        conv = nn.Conv2d(channels, 64, kernel, stride, padding=kernel // 2, bias=False)
        # As torchvision starts every convolution: PyTorch's own default would leave only this one out.
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        return conv
