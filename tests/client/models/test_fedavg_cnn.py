"""FedAvgCNN of cwFedAVG and PFLlib: the released shapes and counts, and the order of the layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import conv2d, linear, max_pool2d, relu

from protofed.client.models.catalogue import build
from protofed.common.config.tables import Input, NamedOptions

GOLDEN = Path(__file__).parents[2] / "golden" / "pfllib_fedavgcnn_shapes.npz"


@pytest.mark.parametrize(
    ("dataset", "shape", "classes", "parameters"),
    [
        ("mnist", (1, 28, 28), 10, 582_026),
        ("cifar10", (3, 32, 32), 10, 878_538),
        ("cifar100", (3, 32, 32), 100, 924_708),
    ],
)
def test_released_names_shapes_and_counts(
    dataset: str, shape: tuple[int, int, int], classes: int, parameters: int
) -> None:
    golden = np.load(GOLDEN)
    model = build(NamedOptions(name="fedavg-cnn"), Input(shape=shape), classes)
    ours = {name: str(tuple(p.shape)) for name, p in model.named_parameters()}
    theirs = [name.replace(".0.", ".") for name in golden[f"{dataset}_names"].tolist()]
    assert [name.replace("head", "fc").removeprefix("body.") for name in ours] == theirs
    assert list(ours.values()) == golden[f"{dataset}_shapes"].tolist()
    assert sum(p.numel() for p in model.parameters()) == golden[f"{dataset}_total"] == parameters


def test_every_layer_is_followed_by_its_relu() -> None:
    torch.manual_seed(0)
    model = build(NamedOptions(name="fedavg-cnn"), Input(shape=(3, 32, 32)), 10)
    p = model.state_dict()
    x = torch.randn(4, 3, 32, 32)
    z = max_pool2d(relu(conv2d(x, p["body.conv1.weight"], p["body.conv1.bias"])), 2)
    z = max_pool2d(relu(conv2d(z, p["body.conv2.weight"], p["body.conv2.bias"])), 2)
    z = relu(linear(z.flatten(1), p["body.fc1.weight"], p["body.fc1.bias"]))  # [B, 512]
    torch.testing.assert_close(model.body(x), z)
    torch.testing.assert_close(model(x), linear(z, p["head.weight"], p["head.bias"]))
