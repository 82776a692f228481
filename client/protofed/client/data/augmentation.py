"""Normalisation and augmentation of batches.

The three augmentations with names are pure functions with equal results on every device. An augmentation of named
transforms has the results that its libraries give: equal for equal seeds, on one kind of device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import pi

import torch
from torch import Tensor
from torch.nn.functional import pad

from protofed.client.data.transforms import ReadyTransform, build_transform, forked_generators
from protofed.common.config.recipe import Augment, AugmentationSetting
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

PADDING = 4  # pixels that are added on every side before a crop
LARGEST_TURN = 15.0  # degrees, to either side
UNITS = {torch.uint8: 255.0, torch.uint16: 65535.0, torch.float32: 1.0}  # what white is, by the images' dtype


@dataclass(frozen=True)
class Augmentation:
    """A random movement of images, in two steps: draw on the CPU, then move on the images' device.

    Attributes:
        draw: count and a generator of the CPU -> [count, ...], all random numbers for so many images, on the CPU.
        move: raw images [B, channels, H, W] and their rows of what was drawn, on the images' device -> moved images.
        copies: `move` copies pixels or makes them black, whatever their values mean.
    """

    draw: Callable[[int, torch.Generator], Tensor]
    move: Callable[[Tensor, Tensor], Tensor]
    copies: bool = True


def move_images(augmentation: Augmentation, images: Tensor, drawn: Tensor) -> Tensor:
    """`move` of raw images [B, channels, H, W], of uint16, too; where pixels are not copied these become float32."""
    if images.dtype != torch.uint16:
        return augmentation.move(images, drawn)
    if augmentation.copies:  # few kernels know uint16; the bits are the same
        return augmentation.move(images.view(torch.int16), drawn).view(torch.uint16)
    return augmentation.move(images / UNITS[torch.uint16], drawn)


def moved_dtype(augmentation: Augmentation, dtype: torch.dtype) -> torch.dtype:
    """What `move_images` makes of raw images of a dtype."""
    return torch.float32 if dtype == torch.uint16 and not augmentation.copies else dtype


def normaliser(input_: Input, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """(pixel - mean) / std by channel, for images of this dtype on this device: [B, channels, H, W] -> float32."""
    shift, scale = (torch.tensor(v, device=device).mul(UNITS[dtype]).view(-1, 1, 1) for v in (input_.mean, input_.std))
    if dtype == torch.float32:
        return lambda images: torch.sub(images, shift).div_(scale)
    return lambda images: images.float().sub_(shift).div_(scale)  # cast first: faster than a kernel that casts


def draw_crop_flips(count: int, rng: torch.Generator) -> Tensor:
    """Random moves [N, 3] int64 on the CPU: top and left edge of the crop in the padded image, and 1 for a flip."""
    edges = torch.randint(2 * PADDING + 1, (count, 2), generator=rng)
    return torch.cat((edges, torch.randint(2, (count, 1), generator=rng)), dim=1)


def draw_crop_flip_rotations(count: int, rng: torch.Generator) -> Tensor:
    """Random moves [N, 5] float64 on the CPU: as `draw_crop_flips`, then cosine and sine of a turn of up to 15 degrees.

    Double precision, and no trigonometry on the device: every device must pick the same pixel.
    """
    moves = draw_crop_flips(count, rng)
    shares = torch.rand(count, 1, generator=rng, dtype=torch.float64)
    angles = (2 * shares - 1) * (LARGEST_TURN * pi / 180)
    return torch.cat((moves.double(), angles.cos(), angles.sin()), dim=1)


def crop_flip(images: Tensor, moves: Tensor) -> Tensor:
    """Pad every image with black, crop it to its size, then flip it left to right or not.

    Args:
        images: [B, channels, H, W], raw pixels: the border is 0 before normalisation.
        moves: [B, 3] as of `draw_crop_flips`, on the images' device.
    """
    return _cropped(pad(images, (PADDING,) * 4), moves)


def reflect_crop_flip(images: Tensor, moves: Tensor) -> Tensor:
    """`crop_flip` of [N, channels, H, W] with a border that mirrors the image about its outermost pixels.

    FedProc on CIFAR-10 (METHODS §4.4).

    Images smaller than the border are mirrored again and again.
    """
    rows, columns = (_mirrored(size, images.device) for size in images.shape[2:])
    return _cropped(images.index_select(2, rows).index_select(3, columns), moves)


def crop_flip_rotate(images: Tensor, moves: Tensor) -> Tensor:
    """`crop_flip`, then `rotate` (FedProc on CIFAR-100, METHODS §4.4); [B, 5] of `draw_crop_flip_rotations`."""
    return rotate(crop_flip(images, moves[:, :3].long()), moves[:, 3:])


def rotate(images: Tensor, turns: Tensor) -> Tensor:
    """Rotate every image counter-clockwise about its centre: nearest pixel, same size, black beyond the edges.

    Args:
        images: [B, channels, H, W].
        turns: [B, 2] float64: cosine and sine of the angle.
    """
    count, channels, height, width = images.shape
    down, right = (torch.arange(n, device=images.device) - (n - 1) / 2 for n in (height, width))  # from the centre
    cos, sin = turns.T.view(2, count, 1, 1)
    # Backwards, from each target pixel to its source: forwards would leave holes.
    columns = (cos * right - sin * down.unsqueeze(1) + (width - 1) / 2).round().long()  # [B, H, W]: the source's column
    rows = (sin * right + cos * down.unsqueeze(1) + (height - 1) / 2).round().long()
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    flat = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    # One `gather` for the whole batch copies pixels exactly, so every device gives the same result.
    index = flat.view(count, 1, -1).expand(-1, channels, -1)
    turned: Tensor = images.flatten(2).gather(2, index).view(images.shape) * inside.unsqueeze(1)
    return turned


AUGMENTATIONS: dict[Augment, Augmentation] = {
    "crop-flip": Augmentation(draw_crop_flips, crop_flip),
    "reflect-crop-flip": Augmentation(draw_crop_flips, reflect_crop_flip),
    "crop-flip-rotate": Augmentation(draw_crop_flip_rotations, crop_flip_rotate),
}


@lru_cache(maxsize=8)
def build_augmentation(setting: AugmentationSetting) -> Augmentation:
    """The augmentation that `plan.augmentation` asks for; "none" has none.

    Raises:
        ConfigError: a transform cannot be made, as of `build_transform`.
    """
    if isinstance(setting, str):
        return AUGMENTATIONS[setting]
    return Augmentation(draw_seeds, partial(transform_each, tuple(map(build_transform, setting))), copies=False)


def draw_seeds(count: int, rng: torch.Generator) -> Tensor:
    """A seed for each image, [N] int64 on the CPU."""
    return torch.randint(2**63 - 1, (count,), generator=rng)


@torch.no_grad()
def transform_each(transforms: Sequence[ReadyTransform], images: Tensor, seeds: Tensor) -> Tensor:
    """Apply transforms to each image by itself, under its own seed, on the images' device.

    Every result has the dtype that the images had, so that a site with 8-bit files normalises it as its files.

    Args:
        images: [B, channels, H, W], uint8, or float32 in 0..1; B is at least 1.
        seeds: [B] as of `draw_seeds`.

    Raises:
        DataError: a transform failed, the last result has another shape, or a plug-in draws from elsewhere.
    """
    numbers = seeds.tolist()
    with forked_generators(images.device) as seed:

        def moved(image: Tensor, number: int) -> Tensor:
            state, result = seed(number), image
            for transform in transforms:
                if transform.use is not None:
                    transform.use(state)
                result = transform(result)
            return _like(image, result, transforms[-1].name)

        results = [moved(image, number) for image, number in zip(images, numbers, strict=True)]
        plugins = [transform.name for transform in transforms if transform.is_plugin]
        # An interrupted fit would go on with other images.
        if plugins and not torch.equal(moved(images[0], numbers[0]), results[0]):
            raise DataError(
                f"plan.augmentation gives another image each time under one seed; expected of {' and '.join(plugins)} "
                "random numbers of PyTorch's, NumPy's or Python's default generator, or a method set_random_state"
            )
    return torch.stack(results)


def _like(image: Tensor, result: Tensor, name: str) -> Tensor:
    """The result [channels, H, W] in the image's dtype.

    Raises:
        DataError: it has another shape.
    """
    if result.shape != image.shape:
        raise DataError(
            f"plan.augmentation makes images {list(result.shape)} of images {list(image.shape)}, last by '{name}'; "
            "expected the same shape. Add a transform that restores the size, such as torchvision/Resize"
        )
    if result.dtype == image.dtype == torch.uint8:
        return result
    unit = result / 255 if result.dtype == torch.uint8 else result.float().clamp(0, 1)
    return unit if image.dtype != torch.uint8 else unit.mul_(255).round_().to(torch.uint8)


def _cropped(bordered: Tensor, moves: Tensor) -> Tensor:
    """[B, channels, H + 2 * PADDING, W + 2 * PADDING] -> [B, channels, H, W]."""
    count, channels, height, width = bordered.shape
    height, width = height - 2 * PADDING, width - 2 * PADDING
    top, left, flip = moves.T.unsqueeze(2)  # [B, 1] each
    rows, columns = (torch.arange(n, device=bordered.device) for n in (height, width))
    columns = left + torch.where(flip == 1, width - 1 - columns, columns)  # [B, W]
    flat = (top + rows).unsqueeze(2) * bordered.shape[3] + columns.unsqueeze(1)  # [B, H, W]: where a pixel comes from
    index = flat.view(count, 1, -1).expand(-1, channels, -1)
    return bordered.flatten(2).gather(2, index).view(count, channels, height, width)


def _mirrored(size: int, device: torch.device) -> Tensor:
    """[size + 2 * PADDING]: the index of the pixel at each place of a row of `size` with its mirrored border."""
    period = max(2 * size - 2, 1)  # the outermost pixels are not repeated; a single pixel has period 1
    place = torch.arange(-PADDING, size + PADDING, device=device) % period
    return torch.where(place < size, place, period - place)
