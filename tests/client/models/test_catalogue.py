"""The catalogue's models: the authors' shapes, numbers and counts, and the way through the codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from protofed.client.models.catalogue import architectures, build
from protofed.client.models.split import SplitModel, dump, load
from protofed.common.codec import decode, encode
from protofed.common.config.tables import Input, NamedOptions
from protofed.common.errors import CodecError, ConfigError
from protofed.common.payload import Part, same_tensors

GOLDEN = Path(__file__).parents[2] / "golden"
COLOUR = Input(shape=(3, 32, 32))
GREY = Input(shape=(1, 8, 8))
WIDE = Input(shape=(1, 28, 16))
GREYS, COLOURS = ("mlp", "digits-cnn", "resnet18", "resnet50"), ("conv2cifar", "fedavg-cnn", "simple-cnn")
ALL = dict.fromkeys(GREYS, GREY) | dict.fromkeys(COLOURS, COLOUR)
assert set(architectures) == set(ALL)
SMALLEST = {"mlp": 1, "digits-cnn": 4, "resnet18": 1, "resnet50": 1} | dict.fromkeys(COLOURS, 16)


def make(name: str, images: Input, classes: int = 10, **options: Any) -> SplitModel:
    return build(NamedOptions.model_validate({"name": name, **options}), images, classes)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "images", "options", "features", "parameters"),
    [
        ("mlp", GREY, {}, 64, 65 * 64 + 65 * 5),
        ("mlp", GREY, {"hidden": [32, 16]}, 16, 65 * 32 + 33 * 16 + 17 * 5),
        ("mlp", GREY, {"hidden": [32, 2], "signed": True, "bias": False}, 2, 65 * 32 + 33 * 2 + 2 * 5),
        ("digits-cnn", GREY, {}, 64, 10 * 16 + 145 * 32 + 129 * 64 + 65 * 5),
        ("digits-cnn", Input(shape=(3, 9, 14)), {"features": 7}, 7, 28 * 16 + 145 * 32 + 193 * 7 + 8 * 5),
        ("conv2cifar", WIDE, {}, 192, 26 * 64 + 1601 * 64 + (64 * 4 + 1) * 384 + 385 * 192 + 192 * 5),
        ("fedavg-cnn", WIDE, {}, 512, 26 * 32 + 801 * 64 + (64 * 4 + 1) * 512 + 513 * 5),
        ("simple-cnn", WIDE, {"projection": 0}, 84, 156 + 2416 + 65 * 120 + 121 * 84 + 85 * 5),
        ("simple-cnn", WIDE, {"projection": 9}, 9, 156 + 2416 + 65 * 120 + 121 * 84 + 85 * 84 + 85 * 9 + 10 * 5),
    ],
)
def test_sizes(name: str, images: Input, options: dict[str, Any], features: int, parameters: int) -> None:
    model = make(name, images, classes=5, **options)
    x = torch.rand(3, *images.shape)
    assert model.body(x).shape == (3, features)
    assert model(x).shape == (3, 5)
    assert count(model) == parameters


def test_conv2cifar_has_the_released_names_shapes_and_counts() -> None:
    golden = np.load(GOLDEN / "fednh_conv2cifar_shapes.npz")
    model = make("conv2cifar", COLOUR)
    named = [*model.body.named_parameters(), ("prototype.weight", model.get_parameter("head.weight"))]
    assert [name for name, _ in named] == golden["names"].tolist()
    assert [str(tuple(p.shape)) for _, p in named] == golden["shapes"].tolist()
    assert count(model) == golden["total_params_K10"] == 797_952
    assert count(make("conv2cifar", COLOUR, 100)) == golden["total_params_K100"] == 815_232


@pytest.mark.parametrize("name", ALL)
def test_round_trip_through_the_codec(name: str) -> None:
    options: dict[str, Any] = {"norm": "batch"} if "resnet" in name else {}  # buffers and integers too
    sent = make(name, ALL[name], **options)
    got = make(name, ALL[name], **options)
    payload = {Part.BODY: dump(sent.body), Part.HEAD: dump(sent.head)}
    x = torch.rand(2, *ALL[name].shape)
    assert not torch.equal(sent(x), got(x))  # and BatchNorm's buffers of both have moved since the dump

    received = decode(encode(payload))
    load(got.body, received[Part.BODY])
    load(got.head, received[Part.HEAD])
    assert same_tensors({Part.BODY: dump(got.body), Part.HEAD: dump(got.head)}, payload)


def test_load_refuses_another_name_or_shape_and_changes_nothing() -> None:
    body = make("mlp", GREY).body
    before = dump(body)
    other = {name: array + 1 for name, array in before.items()}
    renamed = {name.replace("bias", "bios"): array for name, array in other.items()}
    # The last tensor is the wrong one: a check on the way would have copied the first.
    reshaped = other | {"linear1.bias": other["linear1.bias"][:-1]}
    missing = {"linear1.weight": other["linear1.weight"]}
    for tensors, named in ((renamed, "linear1.bi"), (reshaped, r"\(63,\).*\(64,\)"), (missing, "linear1.bias")):
        with pytest.raises(CodecError, match=named):
            load(body, tensors)
        assert same_tensors({Part.BODY: dump(body)}, {Part.BODY: before})
    load(body, other)
    assert same_tensors({Part.BODY: dump(body)}, {Part.BODY: other})


def test_digits_cnn_learns_the_digits_in_seconds() -> None:
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels / 8 - 1, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels)
    torch.manual_seed(0)
    model = make("digits-cnn", GREY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(5):
        for batch in torch.randperm(1400).chunk(44):
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(model(x[batch]), y[batch]))
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
    assert accuracy > 0.9


def test_the_same_seed_gives_the_same_model_and_the_trial_draws_nothing() -> None:
    torch.manual_seed(3)
    plain = architectures.build("resnet18", {"norm": "batch"}).build(GREY, 10)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    tried = make("resnet18", GREY, norm="batch")
    assert torch.equal(torch.get_rng_state(), after)
    assert same_tensors({Part.BODY: dump(tried)}, {Part.BODY: dump(plain)})
    assert all(module.training for module in tried.modules())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet81", {}, "did you mean 'resnet18'"),
        ("mlp", {"hiden": [3]}, "did you mean 'hidden'"),
        ("mlp", {"hidden": [8, 0]}, r"hidden\.1 = 0"),
        ("resnet18", {"groups": 3}, "groups = 3"),
        ("resnet18", {"norm": "layer"}, "norm = 'layer'"),
        ("simple-cnn", {"projection": -1}, "projection = -1"),
        ("simple-cnn", {"normalise": True}, "did you mean 'normalize'"),
        ("fedavg-cnn", {"bias": False}, "bias"),
    ],
)
def test_unknown_names_and_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, GREY, **options)


@pytest.mark.parametrize(("name", "side"), SMALLEST.items())
def test_smallest_images(name: str, side: int) -> None:
    make(name, Input(shape=(1, side, side)))
    if side > 1:
        needs = rf"^model {name} needs images of at least {side}x{side} pixels: .*\[1, {side}, {side - 1}\]$"
        with pytest.raises(ConfigError, match=needs):
            make(name, Input(shape=(1, side, side - 1)))
        with pytest.warns(UserWarning, match="zero-element"):  # not a pixel too strict: nothing is left of less
            architectures.build(name, {}).build(Input(shape=(1, side, side - 1)), 2)


def test_a_signed_mlp_embeds_into_all_of_the_plane() -> None:
    torch.manual_seed(0)
    images = torch.randn(64, *GREY.shape)
    for signed in (False, True):
        features = make("mlp", GREY, hidden=[32, 2], signed=signed).body(images)
        assert (features < 0).any() == signed
