"""The simple CNN of MOON and FedProc: the released shapes and counts, the order of the layers, the projection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, linear, max_pool2d, normalize, relu

from protofed.client.models.catalogue import build
from protofed.client.models.networks import Unit
from protofed.client.models.split import SplitModel
from protofed.common.config.tables import Input, NamedOptions

GOLDEN = Path(__file__).parents[2] / "golden" / "moon_fedproc_model_shapes.npz"


def make(**options: Any) -> SplitModel:
    return build(NamedOptions.model_validate({"name": "simple-cnn", **options}), Input(shape=(3, 32, 32)), 10)


def test_released_names_shapes_and_count() -> None:
    golden = np.load(GOLDEN)
    model = make()
    theirs = [name.removeprefix("features.") for name in golden["simplecnn_names"].tolist()]
    named = dict(model.named_parameters())
    assert [name.replace("head", "l3").removeprefix("body.") for name in named] == theirs
    assert [str(tuple(p.shape)) for p in named.values()] == golden["simplecnn_shapes"].tolist()
    assert sum(p.numel() for p in named.values()) == golden["simplecnn_total"] == 92_626


def base(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Features before the projection, [B, 84]."""
    z = max_pool2d(relu(conv2d(x, p["conv1.weight"], p["conv1.bias"])), 2)
    z = max_pool2d(relu(conv2d(z, p["conv2.weight"], p["conv2.bias"])), 2)
    z = relu(linear(z.flatten(1), p["fc1.weight"], p["fc1.bias"]))
    return relu(linear(z, p["fc2.weight"], p["fc2.bias"]))


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("projection", [0, 256])
def test_relus_projection_and_unit_length_are_in_their_places(projection: int, unit: bool) -> None:
    torch.manual_seed(0)
    model = make(projection=projection, normalize=unit)
    p = model.body.state_dict()
    x = torch.randn(4, 3, 32, 32)
    z = base(p, x)
    if projection:  # no ReLU after it: the embedding has both signs
        z = linear(relu(linear(z, p["l1.weight"], p["l1.bias"])), p["l2.weight"], p["l2.bias"])
    z = normalize(z) if unit else z
    torch.testing.assert_close(model.body(x), z)
    torch.testing.assert_close(
        model(x), linear(z, model.head.get_parameter("weight"), model.head.get_parameter("bias"))
    )


def test_unit_rows_by_hand_and_a_zero_row_stays_zero() -> None:
    rows = Unit()(torch.tensor([[3.0, -4.0], [0.0, 0.0]]))
    torch.testing.assert_close(rows, torch.tensor([[0.6, -0.8], [0.0, 0.0]]))
