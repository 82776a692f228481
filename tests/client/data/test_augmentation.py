"""Normalisation and augmentations of whole batches are torchvision's of single images."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from protofed.client.data.augmentation import (
    AUGMENTATIONS,
    crop_flip,
    crop_flip_rotate,
    draw_crop_flip_rotations,
    draw_crop_flips,
    normaliser,
    reflect_crop_flip,
    rotate,
)
from protofed.common.config.recipe import Augment
from protofed.common.config.tables import Input

RUN = Input(shape=(3, 6, 5), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0))


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some(count: int) -> Tensor:
    return torch.randint(256, (count, 3, 6, 5), generator=rng(), dtype=torch.uint8)


def cropped_and_flipped(bordered: Tensor, move: list[int]) -> Tensor:
    top, left, flip = move
    cropped: Tensor = tv.crop(bordered, top, left, 6, 5)
    flipped: Tensor = tv.horizontal_flip(cropped)
    return flipped if flip else cropped


def test_normalisation_is_by_channel_of_pixels_in_0_to_1() -> None:
    images = torch.tensor([[[[255]], [[51]], [[0]]]], dtype=torch.uint8)
    made = normaliser(RUN, torch.uint8, torch.device("cpu"))(images)
    torch.testing.assert_close(made.flatten(), torch.tensor([1.8, 0.0, -0.3]))  # (1 - .1) / .5, (.2 - .2) / .25, ...
    again = normaliser(RUN, torch.float32, torch.device("cpu"))(images / 255)
    torch.testing.assert_close(again, made)
    one = normaliser(Input(shape=(3, 1, 1)), torch.uint8, torch.device("cpu"))(torch.full((1, 3, 1, 1), 255))
    assert one.flatten().tolist() == [1.0, 1.0, 1.0]  # one value serves all channels


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_flip_is_torchvisions_with_either_border(dtype: torch.dtype) -> None:
    images, moves = some(50).to(dtype), draw_crop_flips(50, rng(3))
    for crop, mode in ((crop_flip, "constant"), (reflect_crop_flip, "reflect")):
        made = crop(images, moves)
        assert made.dtype == dtype
        for image, ours, move in zip(images, made, moves.tolist(), strict=True):
            assert torch.equal(ours, cropped_and_flipped(tv.pad(image, [4], padding_mode=mode), move))


def test_a_mirrored_border_does_not_repeat_the_edge_and_goes_on_in_small_images() -> None:
    row = torch.arange(3, dtype=torch.uint8).view(1, 1, 1, 3)  # 0 1 2 between its mirror images
    (made,) = reflect_crop_flip(row, torch.tensor([[4, 0, 0]])).tolist()
    assert made == [[[0, 1, 2]]]  # of the row 0 1 2 1 | 0 1 2 | 1 0 1 2
    (made,) = reflect_crop_flip(row, torch.tensor([[4, 7, 0]])).tolist()
    assert made == [[[1, 0, 1]]]


@pytest.mark.parametrize("degrees", [-15.0, -7.3, 0.0, 3.1, 14.9])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_rotate_is_torchvisions(degrees: float, dtype: torch.dtype) -> None:
    images = torch.randint(1, 256, (3, 3, 32, 28), generator=rng()).to(dtype)
    turns = torch.tensor([[math.cos(math.radians(degrees)), math.sin(math.radians(degrees))]] * 3, dtype=torch.float64)
    made = rotate(images, turns)
    assert made.dtype == dtype
    assert torch.equal(made, tv.rotate(images, degrees))  # nearest pixel, black beyond the edges
    assert (degrees == 0.0) == bool((made > 0).all())


def test_crop_flip_rotate_turns_each_image_by_its_own_after_the_crop() -> None:
    images = torch.randint(1, 256, (2, 1, 9, 9), generator=rng())
    made = rotate(images, torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64))
    assert torch.equal(made, torch.stack((images[0], images[1].rot90(1, (1, 2)))))  # counter-clockwise
    images, moves = some(20), draw_crop_flip_rotations(20, rng(3))
    made = crop_flip_rotate(images, moves)
    assert torch.equal(made, rotate(crop_flip(images, moves[:, :3].long()), moves[:, 3:]))
    assert not torch.equal(made, crop_flip(images, moves[:, :3].long()))


def test_turns_are_up_to_15_degrees_and_crops_of_every_offset() -> None:
    moves = draw_crop_flip_rotations(2000, rng())
    assert torch.equal(moves[:, :3].long(), draw_crop_flips(2000, rng()))
    angles = torch.atan2(moves[:, 4], moves[:, 3]).rad2deg()
    torch.testing.assert_close(moves[:, 3:].square().sum(1), torch.ones(2000, dtype=torch.float64))
    assert -15 <= float(angles.min()) < -14.8
    assert 14.8 < float(angles.max()) <= 15
    assert abs(float(angles.mean())) < 1
    moves = draw_crop_flips(2000, rng())
    assert [sorted(set(column.tolist())) for column in moves.T] == [list(range(9)), list(range(9)), [0, 1]]
    assert 900 < int(moves[:, 2].sum()) < 1100


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_an_augmentation_moves_each_image_by_its_own_numbers(name: Augment) -> None:
    images, augmentation = some(6), AUGMENTATIONS[name]
    moves = augmentation.draw(6, rng())
    whole = augmentation.move(images, moves)
    assert whole.shape == images.shape
    one_by_one = [augmentation.move(images[n : n + 1], moves[n : n + 1]) for n in range(6)]
    assert torch.equal(whole, torch.cat(one_by_one))
