"""ONNX Runtime predicts as PyTorch does, for every head and for every architecture that the papers use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from protofed.client.models.catalogue import architectures, build
from protofed.client.models.inference import DeployedModel, predict, rebuild
from protofed.client.models.split import CosineHead, NearestHead, PrototypeHead, SplitModel
from protofed.client.task import build_client_task
from protofed.common.config.tables import Input, NamedOptions
from protofed.common.errors import ConfigError
from protofed.deploy.export import formats
from protofed.deploy.export.formats import ExportError, difference, run_onnx, to_onnx

SMALL = Input(shape=(1, 8, 8), mean=(0.4,), std=(0.2,))
MLP = NamedOptions.model_validate({"name": "mlp", "hidden": [16]})
CIFAR = (3, 32, 32)
CLASSES = build_client_task(NamedOptions(name="classification"))
PAPERS: list[tuple[dict[str, Any], tuple[int, int, int]]] = [
    ({"name": "digits-cnn"}, (1, 8, 8)),
    ({"name": "mlp", "hidden": [32, 2], "signed": True}, (1, 1, 2)),
    ({"name": "conv2cifar", "normalize": True}, CIFAR),
    ({"name": "fedavg-cnn"}, (1, 28, 28)),
    ({"name": "simple-cnn", "normalize": True}, CIFAR),
    ({"name": "resnet18"}, (3, 64, 64)),
    ({"name": "resnet18", "no_norm": True}, (3, 64, 64)),
    ({"name": "resnet18", "stem": "imagenet", "norm": "batch", "bias": True}, CIFAR),
    ({"name": "resnet50", "norm": "batch", "projection": 256, "normalize": True}, CIFAR),
]


def headed(model: SplitModel, head: str, classes: int) -> SplitModel:
    """With a head that a method puts in place; the fourth class has no prototype."""
    rows = torch.randn(classes, model.head.get_parameter("weight").shape[1])
    if head == "cosine":
        model.head = CosineHead(nn.functional.normalize(rows), 10.0, fixed=True)
    elif head == "nearest":
        own = PrototypeHead(model.head, classes)
        own.set_prototypes(rows, torch.ones(classes).index_fill(0, torch.tensor([3]), 0))
        model.head = own
    return model


@pytest.mark.parametrize("head", ["own", "cosine", "nearest"])
def test_runtimes_agree_on_pixels_whatever_the_head(head: str) -> None:
    torch.manual_seed(0)
    model = DeployedModel(headed(build(MLP, SMALL, 10), head, 10), SMALL, CLASSES)
    assert model.head == head
    data = to_onnx(model, SMALL, {"format": "protofed-model"})
    assert difference(model, SMALL, run_onnx(data)) < 1e-5
    for path in (b"/work", b"/home", b"site-packages", b"protofed/client"):
        assert path not in data


def test_heads_predict_by_their_prototypes_or_else_linearly() -> None:
    torch.manual_seed(0)
    source = headed(build(MLP, SMALL, 10), "nearest", 10)
    pixels = torch.rand(4, *SMALL.shape)
    with torch.no_grad():
        expected = source((pixels - 0.4) / 0.2)
    outputs, probabilities = predict(DeployedModel(source, SMALL, CLASSES), pixels.numpy())
    torch.testing.assert_close(outputs, expected)
    assert (outputs[:, 3] == -torch.inf).all()
    assert (probabilities[:, 3] == 0).all()
    model = build(MLP, SMALL, 10)
    model.head = PrototypeHead(model.head, 10)
    assert DeployedModel(model, SMALL, CLASSES).head == "own"
    features, rows = torch.randn(6, 5), torch.randn(4, 5)
    found = NearestHead(rows, torch.ones(4))(features)
    torch.testing.assert_close(found, -torch.cdist(features, rows))


@pytest.mark.parametrize("head", ["own", "cosine", "nearest"])
def test_a_model_is_made_again_from_its_weights(head: Any) -> None:
    torch.manual_seed(0)
    first = DeployedModel(headed(build(MLP, SMALL, 10), head, 10), SMALL, CLASSES)
    again = rebuild(MLP, SMALL, 10, head, first.weights(), NamedOptions(name="classification"))
    pixels = np.random.default_rng(0).random((5, *SMALL.shape), dtype=np.float32)
    for expected, actual in zip(predict(first, pixels), predict(again, pixels), strict=True):
        assert torch.equal(expected, actual)
    with pytest.raises(ConfigError, match="not those of model 'digits-cnn'"):
        rebuild(NamedOptions(name="digits-cnn"), SMALL, 10, head, first.weights(), NamedOptions(name="classification"))


def test_a_graph_that_is_wrong_unknown_or_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    data = to_onnx(DeployedModel(build(MLP, SMALL, 10), SMALL, CLASSES), SMALL, {})
    with pytest.raises(ExportError, match="differ by"):
        difference(DeployedModel(build(MLP, SMALL, 10), SMALL, CLASSES), SMALL, run_onnx(data))

    class Odd(nn.Module):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return features * 2 if bool(features.sum() > 0) else features

    model = build(MLP, SMALL, 10)
    model.body.add_module("odd", Odd())
    with pytest.raises(ConfigError, match="cannot be made ONNX"):
        to_onnx(DeployedModel(model, SMALL, CLASSES), SMALL, {})
    monkeypatch.setattr(formats, "LARGEST", 1000)
    with pytest.raises(ConfigError, match="--format"):
        to_onnx(DeployedModel(build(MLP, SMALL, 10), SMALL, CLASSES), SMALL, {})


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "shape"), PAPERS, ids=lambda value: str(value)[:60])
def test_runtimes_agree_on_every_architecture(architecture: dict[str, Any], shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    images = Input(shape=shape)
    model = DeployedModel(build(NamedOptions.model_validate(architecture), images, 10), images, CLASSES)
    assert difference(model, images, run_onnx(to_onnx(model, images, {}))) < 1e-5


def test_every_architecture_of_the_catalogue_is_among_them() -> None:
    assert {architecture["name"] for architecture, _ in PAPERS} == set(architectures)
