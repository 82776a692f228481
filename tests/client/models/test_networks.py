"""ResNet-18 and -50: published counts, torchvision's names, stems, normalisation layers and the projection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear, max_pool2d, normalize, relu
from torchvision.models import resnet18, resnet50

from protofed.client.models.catalogue import build
from protofed.client.models.networks import Unit
from protofed.client.models.split import SplitModel
from protofed.common.config.tables import Input, NamedOptions

GOLDEN = Path(__file__).parents[2] / "golden" / "moon_fedproc_model_shapes.npz"
COLOUR = Input(shape=(3, 32, 32))
LARGE = Input(shape=(3, 64, 64))
GREY = Input(shape=(1, 8, 8))
FEDPRP = {"stem": "imagenet", "norm": "batch", "bias": True}
FEDPROC = {"stem": "small", "norm": "batch", "projection": 256, "normalize": True}


def make(name: str, images: Input, classes: int = 10, **options: Any) -> SplitModel:
    return build(NamedOptions.model_validate({"name": name, **options}), images, classes)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "images", "classes", "options", "parameters"),
    [
        # Widely published: torchvision's own with 1000 classes, and the CIFAR variants with a 3x3 stem.
        ("resnet18", LARGE, 1000, FEDPRP, 11_689_512),
        ("resnet18", COLOUR, 10, FEDPRP, 11_689_512 - 990 * 513),
        ("resnet18", COLOUR, 10, {"norm": "batch", "bias": True}, 11_173_962),
        ("resnet18", COLOUR, 10, {"bias": True}, 11_173_962),
        ("resnet18", COLOUR, 10, {}, 11_173_952),
        ("resnet18", GREY, 10, {}, 11_173_952 - 2 * 64 * 9),
        ("resnet18", COLOUR, 10, {"projection": 256}, 11_173_952 - 5120 + 513 * 512 + 513 * 256 + 2560),
        ("resnet50", LARGE, 1000, FEDPRP, 25_557_032),
        ("resnet50", COLOUR, 10, {"norm": "batch"}, 23_520_842),
        # FedNH: a scale and a shift by channel fewer, for the stem and for two layers a block in eight blocks.
        ("resnet18", LARGE, 200, {"no_norm": True}, 11_173_952 + 190 * 512 - 2 * (64 + 2 * 2 * (64 + 128 + 256 + 512))),
    ],
)
def test_parameter_counts(name: str, images: Input, classes: int, options: dict[str, Any], parameters: int) -> None:
    assert count(make(name, images, classes, **options)) == parameters


def test_fedprocs_has_the_released_head_and_only_the_larger_ones_a_bias() -> None:
    golden = np.load(GOLDEN)
    model = make("resnet50", COLOUR, 100, **FEDPROC)
    last = [model.get_parameter(f"{name}.weight") for name in ("body.fc.l1", "body.fc.l2", "head")]
    assert [str(tuple(weight.shape)) for weight in last] == golden["resnet50_head_shapes"].tolist()
    assert count(model) == golden["resnet50_total_K100"] == 28_246_948
    assert [make(name, GREY).head.bias is None for name in ("resnet18", "resnet50")] == [True, False]
    assert make("resnet50", GREY, bias=False).head.bias is None


@pytest.mark.parametrize(("name", "theirs"), [("resnet18", resnet18), ("resnet50", resnet50)])
def test_torchvisions_names_shapes_and_features(name: str, theirs: Any) -> None:
    body, net = make(name, LARGE, stem="imagenet", norm="batch").body.eval(), theirs().eval()
    net.fc = nn.Identity()
    assert {n: t.shape for n, t in body.state_dict().items()} == {n: t.shape for n, t in net.state_dict().items()}
    net.load_state_dict(body.state_dict())
    x = torch.rand(2, *LARGE.shape)
    torch.testing.assert_close(body(x), net(x))


def test_small_stem_keeps_the_image_size_and_starts_as_the_other_convolutions() -> None:
    torch.manual_seed(0)
    body = make("resnet18", GREY).body
    x = torch.rand(1, *GREY.shape)
    for layer in ("conv1", "bn1", "relu", "maxpool"):
        x = body.get_submodule(layer)(x)
    assert x.shape == (1, 64, 8, 8)
    weight = make("resnet18", COLOUR).body.get_parameter("conv1.weight")
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)  # He et al., 2015, by fan_out


@pytest.mark.parametrize(
    ("name", "options", "layers", "groups"),
    [("resnet18", {}, 20, 2), ("resnet18", {"groups": 8}, 20, 8), ("resnet50", {"groups": 64}, 53, 64)],
)
def test_group_norm_everywhere(name: str, options: dict[str, int], layers: int, groups: int) -> None:
    modules = list(make(name, GREY, **options).modules())
    norms = [module for module in modules if isinstance(module, nn.GroupNorm)]
    assert len(norms) == layers
    assert {norm.num_groups for norm in norms} == {groups}
    assert not any(isinstance(module, nn.BatchNorm2d) for module in modules)


@pytest.mark.parametrize(("name", "shortcuts"), [("resnet18", [2, 3, 4]), ("resnet50", [1, 2, 3, 4])])
@pytest.mark.parametrize(("norm", "kind"), [("group", nn.GroupNorm), ("batch", nn.BatchNorm2d)])
def test_no_norm_leaves_the_shortcuts(name: str, shortcuts: list[int], norm: str, kind: type[nn.Module]) -> None:
    body = make(name, GREY, norm=norm, no_norm=True).body
    left = [n for n, module in body.named_modules() if isinstance(module, (nn.GroupNorm, nn.BatchNorm2d))]
    assert left == [f"layer{i}.0.downsample.1" for i in shortcuts]
    assert all(isinstance(body.get_submodule(n), kind) for n in left)


def test_no_norm_starts_with_finite_features_and_gradients() -> None:
    torch.manual_seed(0)
    model = make("resnet18", LARGE, no_norm=True)
    logits = model(torch.randn(4, *LARGE.shape))
    torch.autograd.backward(logits.logsumexp(1).mean())
    assert logits.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("unit", [False, True])
def test_projection_and_unit_length_come_last(unit: bool) -> None:
    torch.manual_seed(0)
    body: Any = make("resnet18", GREY, projection=7, normalize=unit).body
    x = torch.randn(3, *GREY.shape)
    got = body(x)
    l1, l2 = body.fc.l1, body.fc.l2
    body.fc = nn.Identity()
    z: Tensor = linear(relu(linear(body(x), l1.weight, l1.bias)), l2.weight, l2.bias)  # [B, 7]
    torch.testing.assert_close(got, normalize(z) if unit else z)


# The simple CNN of MOON and FedProc


def test_released_names_shapes_and_count() -> None:
    golden = np.load(GOLDEN)
    model = make("simple-cnn", COLOUR)
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
    model = make("simple-cnn", COLOUR, projection=projection, normalize=unit)
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


# FedAvgCNN of cwFedAVG and PFLlib


PFLLIB = Path(__file__).parents[2] / "golden" / "pfllib_fedavgcnn_shapes.npz"


@pytest.mark.parametrize(
    ("dataset", "shape", "classes", "parameters"),
    [
        ("mnist", (1, 28, 28), 10, 582_026),
        ("cifar10", (3, 32, 32), 10, 878_538),
        ("cifar100", (3, 32, 32), 100, 924_708),
    ],
)
def test_released_names_and_counts(dataset: str, shape: tuple[int, int, int], classes: int, parameters: int) -> None:
    golden = np.load(PFLLIB)
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
