"""Preparation and augmentation by named transforms: of torchvision, of MONAI and of plug-ins."""

from __future__ import annotations

import inspect
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import monai.transforms
import numpy as np
import pytest
import torch
from monai.transforms.transform import Randomizable
from numpy.typing import NDArray
from tests.support.image_files import ramp, save, settings
from torch import Tensor
from torchvision.transforms import v2

from protofed.client.data.augmentation import AUGMENTATIONS, build_augmentation
from protofed.client.data.decoding import decode
from protofed.client.data.examples import Examples
from protofed.client.data.file_entry import TooManyUnreadableError
from protofed.client.data.preparation import Preparation
from protofed.client.data.site_data import SiteData
from protofed.client.data.sources import load
from protofed.common import plugins
from protofed.common.config.tables import Input, NamedTransform
from protofed.common.config.transforms import OPTIONS, is_random
from protofed.common.errors import ConfigError, DataError

LIBRARIES = {"torchvision": v2, "monai": monai.transforms}
# What each class needs beside its defaults, to change an image of 32 x 32 pixels in 0..1 into such an image.
NEEDED: dict[str, dict[str, Any]] = {
    "torchvision/CenterCrop": {"size": 20},
    "torchvision/ColorJitter": {"brightness": 0.5},
    "torchvision/GaussianBlur": {"kernel_size": 3},
    "torchvision/Grayscale": {"num_output_channels": 3},
    "torchvision/Pad": {"padding": 2},
    "torchvision/RandomAdjustSharpness": {"sharpness_factor": 2},
    "torchvision/RandomAffine": {"degrees": 20},
    "torchvision/RandomCrop": {"size": 32, "padding": 4},
    "torchvision/RandomPosterize": {"bits": 3},
    "torchvision/RandomResizedCrop": {"size": 32},
    "torchvision/RandomRotation": {"degrees": 15},
    "torchvision/Resize": {"size": [30, 20], "interpolation": "bicubic"},
    "monai/AdjustContrast": {"gamma": 0.7},
    "monai/BorderPad": {"spatial_border": 2},
    "monai/CenterScaleCrop": {"roi_scale": 0.8},
    "monai/CenterSpatialCrop": {"roi_size": 20},
    "monai/ClipIntensityPercentiles": {"lower": 5, "upper": 95},
    "monai/CropForeground": {"margin": 1},
    "monai/GaussianSharpen": {"alpha": 0.1},
    "monai/HistogramNormalize": {"max": 1},
    "monai/Rand2DElastic": {"spacing": 5, "magnitude_range": [1, 2]},
    "monai/RandAffine": {"rotate_range": 0.3},
    "monai/RandCoarseDropout": {"holes": 2, "spatial_size": 5},
    "monai/RandCoarseShuffle": {"holes": 2, "spatial_size": 5},
    "monai/RandRotate": {"range_x": 0.3},
    "monai/RandScaleIntensity": {"factors": 0.3},
    "monai/RandShiftIntensity": {"offsets": 0.3},
    "monai/RandSpatialCrop": {"roi_size": 20, "random_size": False},
    "monai/Resize": {"spatial_size": [20, 30]},
    "monai/ResizeWithPadOrCrop": {"spatial_size": [20, 40]},
    "monai/ScaleIntensityRange": {"a_min": 0.1, "a_max": 0.9, "b_min": 0, "b_max": 1, "clip": True},
    "monai/ScaleIntensityRangePercentiles": {"lower": 5, "upper": 95, "b_min": 0.0, "b_max": 1.0, "clip": True},
    "monai/SpatialPad": {"spatial_size": 40},
}
MODULE = """
import random
import numpy as np
import torch

state = np.random.default_rng()
threads = []

def of(function):
    return lambda **options: lambda image: function(image, **options)

shade = of(lambda image, by=0.5: (image * by).to(image.dtype))
identity = of(lambda image: image)
wipes_its_image = of(lambda image: image.zero_())
default_generators = of(lambda image: (image * random.random() * np.random.rand() * torch.rand(())).to(image.dtype))
own_generator = of(lambda image: (image * state.random()).to(image.dtype))
flat = of(lambda image: image[0])
drops_a_channel = of(lambda image: image[:1])
arrays = of(lambda image: image.numpy())
whole_numbers = of(lambda image: image.int())
no_numbers = of(lambda image: image * float("nan"))
blown_up = of(lambda image: image * 3.0 + 1)
fails = of(lambda image: 1 / 0)
smaller = of(lambda image: image[:, 1:])
def no_function(): return 3
def needs_options(*, sigma): return lambda image: image
"""
NAMES = [line.split(" =")[0].removeprefix("def ").partition("(")[0] for line in MODULE.splitlines() if "(" in line]


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plugins, "_allowed", {f"outside:{name}" for name in NAMES})
    (tmp_path / "outside.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("outside", None)


def named(name: str, **options: Any) -> NamedTransform:
    return NamedTransform.model_validate({"transform": name, **options})


def example(name: str) -> NamedTransform:
    """A transform of the tables that acts on such images; where it has a chance, in half of the cases."""
    chance = {key: 0.5 for key in ("p", "prob") if key in OPTIONS[name]}
    return named(name, **NEEDED.get(name, {}), **chance)


def run(*steps: NamedTransform, shape: tuple[int, int, int] = (3, 32, 32), **more: Any) -> Input:
    return Input(shape=shape, prepare=steps, **more)


def pixels(dtype: type = np.uint8, channels: int = 3) -> NDArray[Any]:
    values = np.random.default_rng(0).integers(1, 256, (channels, 32, 32), np.uint8)
    return values if dtype == np.uint8 else (values / np.float32(255))


def images(count: int = 4, dtype: torch.dtype = torch.uint8) -> Tensor:
    values = torch.randint(256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    values = values // 2 + 50  # neither black nor white, so that there is contrast to gain
    return values if dtype == torch.uint8 else values / 255


def generators() -> tuple[list[int], list[int], int, object]:
    """Where the default generators of PyTorch, NumPy and Python are."""
    state = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().tolist(), state["key"].tolist(), state["pos"], random.getstate()


def prepared(*steps: NamedTransform, of: NDArray[Any] | None = None) -> NDArray[Any]:
    return Preparation.of(run(*steps))(pixels() if of is None else of)


# The tables against the libraries


@pytest.mark.parametrize("name", OPTIONS)
def test_the_tables_have_classes_with_such_options_and_know_which_are_random(name: str) -> None:
    library, _, class_name = name.partition("/")
    found = getattr(LIBRARIES[library], class_name)
    assert OPTIONS[name] <= set(inspect.signature(found).parameters)
    named_random = class_name.startswith("Rand") or issubclass(found, Randomizable)
    assert is_random(name) or not named_random


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("name", [name for name in OPTIONS if not is_random(name)])
def test_every_deterministic_transform_prepares_images_alike_whatever_the_seeds(name: str, dtype: type) -> None:
    preparation = Preparation.of(run(example(name)))
    given = pixels(dtype)
    torch.manual_seed(1)
    first = preparation(given)
    torch.manual_seed(2)
    assert np.array_equal(preparation(given), first)
    assert first.dtype in (np.uint8, np.float32)
    assert not np.array_equal(first, given), "each is shown by an example that acts"
    assert np.array_equal(given, pixels(dtype)), "the image stays as it was"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("name", [name for name in OPTIONS if is_random(name)])
def test_every_random_transform_follows_from_the_seed_alone_and_changes_no_image_in_place(
    name: str, dtype: torch.dtype
) -> None:
    # RandSpatialCrop alone makes images smaller.
    augmentation = build_augmentation((example(name), named("torchvision/Resize", size=[32, 32])))
    given = images(dtype=dtype)
    seeds = augmentation.draw(len(given), torch.Generator().manual_seed(3))
    torch.manual_seed(1)
    moved = augmentation.move(given, seeds)
    assert (moved.dtype, moved.shape, type(moved)) == (dtype, given.shape, Tensor)
    torch.manual_seed(2)
    backwards = augmentation.move(given.flip(0), seeds.flip(0)).flip(0)
    assert torch.equal(moved, backwards), "an image's seed counts, not its place in the batch"
    assert torch.equal(given, images(dtype=dtype))
    others = [augmentation.move(given, seeds + number) for number in range(1, 9)]
    assert not all(torch.equal(one, moved) for one in others)


# Preparation


def test_a_preparation_applies_its_transforms_in_their_order() -> None:
    made = prepared(named("torchvision/CenterCrop", size=20), named("torchvision/Pad", padding=1))
    assert np.array_equal(made, np.pad(pixels()[:, 6:26, 6:26], ((0, 0), (1, 1), (1, 1))))
    assert np.array_equal(
        prepared(named("monai/ScaleIntensityRange", a_min=0, a_max=1, b_min=1, b_max=0)),
        1 - pixels() / np.float32(255),
    )


def test_a_file_is_prepared_after_its_colours_and_before_it_is_fitted(tmp_path: Path) -> None:
    file = save(tmp_path / "a.png", ramp(8, 8, 1))
    crop = named("torchvision/CenterCrop", size=4)
    made = decode(file, run(crop, shape=(3, 4, 4), colours="convert"))
    assert np.array_equal(made, np.broadcast_to(ramp(8, 8, 1)[2:6, 2:6], (3, 4, 4)))
    assert decode(file, run(crop, shape=(1, 2, 2), fit="stretch")).shape == (1, 2, 2)
    with pytest.raises(DataError, match=r"4 x 4 pixels.*input\.fit"):
        decode(file, run(crop, shape=(1, 8, 8)))
    windowed = decode(file, run(named("monai/ScaleIntensity"), shape=(1, 8, 8), window=(31.5, 63)))
    assert windowed.dtype == np.uint16
    assert (windowed.min(), windowed.max()) == (0, 65535)


def test_monai_brings_no_other_library_that_reports_or_logs() -> None:
    code = """
import logging, os
from protofed.client.data.transforms import build_transform
from protofed.common.config.tables import NamedTransform
build_transform(NamedTransform.model_validate({"transform": "monai/ScaleIntensity"}))
assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
assert not logging.getLogger("alembic").handlers and not logging.getLogger("mlflow").handlers
"""
    without = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    subprocess.run([sys.executable, "-c", code], check=True, env=without)


def test_an_image_on_which_a_transform_fails_is_left_out_by_itself_under_noise(tmp_path: Path) -> None:
    for number in range(36):  # a refusal of the site would tell of the dark one
        save(
            tmp_path / ("mel" if number % 2 else "nv") / f"{number}.png",
            np.full((8, 8), 0 if number == 5 else 200, np.uint8),
        )
    gain = run(named("monai/ScaleIntensityRange", a_min=0, a_max=1, b_min=2, b_max=0.5), shape=(1, 8, 8))
    data = settings("folder", tmp_path)
    source = load(data, gain, ("mel", "nv"), noisy=True)
    assert len(source.train) + len(source.test) == 35
    with pytest.raises(TooManyUnreadableError, match="1 of 36 images cannot be read: 1 × transform 'monai/ScaleInt"):
        load(data, gain, ("mel", "nv"))


@pytest.mark.parametrize("fit", ["stretch", "crop", "pad"])
@pytest.mark.parametrize("channels", [1, 3])
def test_what_a_preparation_leaves_alone_has_the_bytes_of_no_preparation(
    fit: str, channels: int, tmp_path: Path
) -> None:
    file = save(tmp_path / "a.png", ramp(9, 7, channels))
    alone = decode(file, Input.model_validate({"shape": (channels, 4, 5), "fit": fit}))
    made = decode(file, run(named("outside:identity"), shape=(channels, 4, 5), fit=fit))
    assert np.array_equal(made, alone)
    assert made.dtype == alone.dtype


def test_a_plug_in_is_called_with_its_options_and_must_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert np.array_equal(prepared(named("outside:shade", by=0.25)), (pixels() * np.float32(0.25)).astype(np.uint8))
    monkeypatch.setattr(plugins, "_allowed", set())
    with pytest.raises(ConfigError, match="'outside:identity' is a plug-in that is not allowed here"):
        prepared(named("outside:identity"), named("outside:identity"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "flat",
            "made torch.uint8 of shape [32, 32] of an image torch.uint8 of shape [3, 32, 32]; expected a tensor [3",
        ),
        ("drops_a_channel", "expected a tensor [3, height, width]"),
        ("arrays", "made a ndarray"),
        ("whole_numbers", "values of torch.int32 of an image; expected uint8, or floats from 0 to 1"),
        ("no_numbers", "values that are no numbers"),
        ("blown_up", "values from 4 to 766"),
        ("fails", "failed on an image torch.uint8 of shape [3, 32, 32]: ZeroDivisionError: division by zero. Correct"),
        ("default_generators", "gives another result each time. A preparation must be deterministic"),
        ("own_generator", "gives another result each time"),
    ],
)
def test_what_is_wrong_with_an_image_names_the_transform_and_what_was_expected(name: str, said: str) -> None:
    with pytest.raises(DataError) as error:
        prepared(named(f"outside:{name}"))
    assert f"'outside:{name}'" in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (named("torchvision/CenterCrop"), "cannot be made of the options {}: TypeError"),
        (named("outside:needs_options"), "missing 1 required keyword-only argument: 'sigma'"),
        (named("outside:no_function"), "made a int: expected a function of an image"),
        (named("outside:nothing"), "not allowed"),
        (named("clahe"), "unknown transform 'clahe'"),
    ],
)
def test_a_transform_that_cannot_be_made_is_refused_before_any_image(step: NamedTransform, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Preparation.of(run(step))
    assert said in str(error.value)


def test_threads_check_a_plug_in_once_and_leave_the_generators_where_they_were() -> None:
    preparation = Preparation.of(run(named("outside:shade", by=0.1)))
    before = generators()
    with ThreadPool(4) as pool:
        made = pool.map(preparation, [pixels()] * 16)
    assert all(np.array_equal(one, made[0]) for one in made)
    assert generators() == before


def test_without_its_library_a_transform_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "monai.transforms", None)
    with pytest.raises(ConfigError, match=r"'monai/MedianSmooth' needs its library: pip install .*\[monai\]"):
        Preparation.of(run(named("monai/MedianSmooth", radius=3)))


def test_decoding_without_a_preparation_does_without_pytorch() -> None:
    script = "import sys, protofed.client.data.decoding as d; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


# Augmentation


def test_an_augmentation_of_transforms_is_torchvisions_under_each_images_own_seed() -> None:
    given, flip = images(8), named("torchvision/RandomHorizontalFlip")
    augmentation = build_augmentation((flip,))
    seeds = augmentation.draw(8, torch.Generator().manual_seed(0))
    assert (seeds.dtype, seeds.shape, len(set(seeds.tolist()))) == (torch.int64, (8,), 8)
    expected = []
    for image, seed in zip(given, seeds.tolist(), strict=True):
        torch.manual_seed(seed)
        expected.append(v2.RandomHorizontalFlip()(image))
    moved = augmentation.move(given, seeds)
    assert torch.equal(moved, torch.stack(expected))
    assert 0 < sum(torch.equal(one, image) for one, image in zip(moved, given, strict=True)) < 8


def test_two_transforms_of_monai_draw_one_after_the_other_and_not_the_same_numbers() -> None:
    steps = tuple(named("monai/RandFlip", prob=0.5, spatial_axis=axis) for axis in (0, 1))
    augmentation, given = build_augmentation(steps), images(64)
    moved = augmentation.move(given, augmentation.draw(64, torch.Generator().manual_seed(0)))
    kinds = {
        (torch.equal(one, image.flip(1)), torch.equal(one, image.flip(2)))
        for one, image in zip(moved, given, strict=True)
    }
    assert {(True, False), (False, True)} <= kinds, "drawn alike, both would flip or none"


def test_intensities_of_monai_mean_0_to_1_whether_files_have_8_bits_or_more() -> None:
    augmentation = build_augmentation((named("monai/RandShiftIntensity", offsets=[0.2, 0.2], prob=1.0),))
    seeds = augmentation.draw(4, torch.Generator().manual_seed(0))
    of_bytes, of_floats = augmentation.move(images(), seeds), augmentation.move(images(dtype=torch.float32), seeds)
    torch.testing.assert_close(of_bytes / 255, of_floats, atol=0.5 / 255, rtol=0)
    torch.testing.assert_close(of_floats, (images(dtype=torch.float32) + 0.2).clamp(0, 1))


def test_the_generators_of_the_fit_stay_where_they_were() -> None:
    augmentation = build_augmentation((named("torchvision/RandomHorizontalFlip"), named("outside:default_generators")))
    seeds = augmentation.draw(4, torch.Generator().manual_seed(0))
    before = generators()
    first = augmentation.move(images(dtype=torch.float32), seeds)
    assert generators() == before
    assert torch.equal(augmentation.move(images(dtype=torch.float32), seeds), first)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_generator", r"another image each time under one seed; expected of outside:own_generator random numbers"),
        ("smaller", r"images \[3, 31, 32\] of images \[3, 32, 32\], last by 'outside:smaller'.*torchvision/Resize"),
        ("fails", "'outside:fails' failed"),
    ],
)
def test_an_augmentation_that_cannot_be_repeated_or_changes_the_shape_is_refused(name: str, said: str) -> None:
    augmentation = build_augmentation((named(f"outside:{name}"),))
    with pytest.raises(DataError, match=said):
        augmentation.move(images(2, torch.float32), torch.tensor([1, 2]))


def test_a_plug_in_that_writes_into_its_image_harms_no_example() -> None:
    given = images(2)
    moved = build_augmentation((named("outside:wipes_its_image"),)).move(given, torch.tensor([1, 2]))
    assert not moved.any()
    assert torch.equal(given, images(2))


def test_batches_of_a_site_are_augmented_alike_epoch_by_epoch_and_row_by_row() -> None:
    flips = (named("torchvision/RandomHorizontalFlip"), named("monai/RandGaussianNoise", prob=0.5))
    data = SiteData(Examples(images(6), torch.arange(6) % 2), Examples(images(2), torch.arange(2)), run(), 2)

    def epoch(seed: int, size: int) -> Tensor:
        return torch.cat([x for x, _ in data.batches(size, torch.Generator().manual_seed(seed), flips)])

    assert torch.equal(epoch(0, 2), epoch(0, 3)), "micro-batches and batch sizes change no image"
    assert not torch.equal(epoch(0, 2), epoch(1, 2))
    augmentation, rows = build_augmentation(flips), torch.tensor([4, 1])
    moves = augmentation.draw(2, torch.Generator().manual_seed(0))
    alone = torch.cat([data.at(rows[n : n + 1], flips, moves[n : n + 1])[0] for n in range(2)])
    assert torch.equal(data.at(rows, flips, moves)[0], alone)


def test_names_stay_the_hand_written_augmentations() -> None:
    assert build_augmentation("crop-flip") is AUGMENTATIONS["crop-flip"]
    assert {name: build_augmentation(name) for name in AUGMENTATIONS} == AUGMENTATIONS
