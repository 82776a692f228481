"""Layers that several models of the catalogue share."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import normalize

from protofed.common.config.recipe import Input

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
