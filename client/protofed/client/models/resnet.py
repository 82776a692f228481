"""ResNet-18 and -50 (He et al., CVPR 2016) as torchvision builds them, with stems and normalisations for federations.

Blocks and tensor names are torchvision's; a projection is its `fc`. What the papers used (METHODS 1.6, 2.4, 4.2, 4.3):

| paper                         | model    | options that differ from the defaults           |
|-------------------------------|----------|-------------------------------------------------|
| FedNH's baselines             | resnet18 |                                                 |
| FedNH, on TinyImageNet        | resnet18 | no_norm = true                                  |
| FedPRP                        | resnet18 | stem = "imagenet", norm = "batch", bias = true  |
| MOON (FedProc: + normalize)   | resnet50 | norm = "batch", projection = 256                |
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import nn

from protofed.client.models.layers import embedding
from protofed.client.models.split import SplitModel
from protofed.common.config.recipe import Input


@dataclass(frozen=True)
class ResNet:
    """The options of both depths; the defaults are those of FedNH's baselines on TinyImageNet.

    GroupNorm is the default because it has no running statistics, which differ from site to site under skew.
    """

    smallest: ClassVar[int] = 1
    block: ClassVar[str]  # the name of torchvision's class
    blocks: ClassVar[list[int]]  # of each of the four layers

    stem: Literal["small", "imagenet"] = "small"  # 3x3 of stride 1 without max-pooling; or 7x7 of stride 2 with it
    norm: Literal["group", "batch"] = "group"  # GroupNorm or BatchNorm
    groups: Literal[1, 2, 4, 8, 16, 32, 64] = 2  # of GroupNorm; each divides every layer's channels
    no_norm: bool = False  # normalise in the 1x1 shortcuts only
    projection: Annotated[int, Field(ge=0)] = 0  # Q: size of the embedding after two more layers; 0: no projection
    normalize: bool = False  # unit embedding
    bias: bool = False  # of the head

    def build(self, images: Input, classes: int) -> SplitModel:
        """Body [B, channels, height, width] -> [B, projection or 512 (ResNet-50: 2048)], head -> [B, classes]."""
        from torchvision.models import resnet  # brings half of PyTorch's compiler along: seconds, only for these models

        net: Any = resnet.ResNet(getattr(resnet, self.block), self.blocks, norm_layer=self._norm)
        net.conv1 = self._stem(images.shape[0])
        if self.stem == "small":
            net.maxpool = nn.Identity()
        if self.no_norm:
            _remove_norms(net)
        features = net.fc.in_features
        net.fc = nn.Sequential(OrderedDict(embedding(features, self.projection, self.normalize)))  # the head is ours
        return SplitModel(net, nn.Linear(self.projection or features, classes, self.bias))

    def _norm(self, channels: int) -> nn.Module:
        return nn.GroupNorm(self.groups, channels) if self.norm == "group" else nn.BatchNorm2d(channels)

    def _stem(self, channels: int) -> nn.Conv2d:
        kernel, stride = (3, 1) if self.stem == "small" else (7, 2)
        conv = nn.Conv2d(channels, 64, kernel, stride, padding=kernel // 2, bias=False)
        # As torchvision starts every convolution: PyTorch's own default would leave only this one out.
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        return conv


def _remove_norms(net: nn.Module) -> None:
    """Replace the normalisation layers of stem and main branches by the identity; those of shortcuts stay."""
    for module in net.modules():
        for name in ("bn1", "bn2", "bn3"):
            if hasattr(module, name):
                setattr(module, name, nn.Identity())


@dataclass(frozen=True)
class ResNet18(ResNet):
    """11,173,962 parameters with 10 classes, the small stem and a head with bias."""

    block: ClassVar[str] = "BasicBlock"
    blocks: ClassVar[list[int]] = [2, 2, 2, 2]


@dataclass(frozen=True)
class ResNet50(ResNet):
    """28,223,818 parameters with 10 classes, the small stem and FedProc's projection; its head has a bias."""

    block: ClassVar[str] = "Bottleneck"
    blocks: ClassVar[list[int]] = [3, 4, 6, 3]

    bias: bool = True  # of the head
