"""The networks of the catalogue, and the layers that several of them share.

Conv2Cifar of FedNH (Dai et al., AAAI 2023; released code at 60c3161, `models/CNN.py`; METHODS 1.6).

A small convolutional network for digits of 8x8 pixels and the like: seconds a run on one CPU core.

FedAvgCNN, the network of cwFedAVG (Lee and Choi, arXiv 2406.07800) and of PFLlib; METHODS 3.3.

The simple CNN of MOON (Li et al., CVPR 2021) and FedProc (Mu et al., 2021); METHODS 4.2 and 4.3.

A multilayer perceptron, for small images and fast tests.

ResNet-18 and -50 (He et al., CVPR 2016) as torchvision builds them, with stems and normalisations for federations.

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
from itertools import pairwise
from math import prod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from protofed.client.models.split import SplitModel
from protofed.common.config.tables import Input

CONVOLVED = 16  # pixels a side that `convolutions` needs: 16 -> 12 -> 6 -> 2 -> 1


class Unit(nn.Module):
    """Rows divided by their norm; a zero row stays zero. [B, D] -> [B, D]."""

    def forward(self, features: Tensor) -> Tensor:
        """Unit rows [B, D], with the `eps` of FedNH's and FedProc's released codes (1e-12)."""
        return normalize(features, dim=-1)


def convolutions(images: Input, first: int, second: int) -> tuple[dict[str, nn.Module], int]:
    """Two 5x5 convolutions without padding, each with ReLU and 2x2 max-pooling, then flattened.

    Args:
        images: of `CONVOLVED` pixels a side or more.
        first: channels of the first convolution.
        second: channels of the second one.

    Returns:
        The layers by name, [B, channels, height, width] -> [B, size], and `size`.
    """
    channels, height, width = images.shape
    layers = {
        "conv1": nn.Conv2d(channels, first, 5),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(first, second, 5),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
    }
    return layers, second * _output_side(height) * _output_side(width)


def _output_side(side: int) -> int:
    """Pixels a side after both convolutions and poolings."""
    return ((side - 4) // 2 - 4) // 2


def embedding(features: int, projection: int, unit: bool) -> dict[str, nn.Module]:
    """Last layers of a body: MOON's projection head (Li et al., CVPR 2021; FedProc's too), then unit length.

    Args:
        features: D of the network before them, [B, D].
        projection: Q that the two linear layers map it to, [B, Q]; 0: neither layer.
        unit: rows of unit length, as in FedProc's released code (METHODS 4.2); MOON's has none.

    Returns:
        The layers by the released code's names; empty where both are off.
    """
    layers: dict[str, nn.Module] = {}
    if projection:
        layers |= {"l1": nn.Linear(features, features), "relu": nn.ReLU(), "l2": nn.Linear(features, projection)}
    if unit:
        layers["unit"] = Unit()
    return layers


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
