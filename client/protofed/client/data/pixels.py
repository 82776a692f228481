"""What is done to raw pixels on their way to the model: pure functions of whole batches, alike on every device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from protofed.common.recipe import Input

PADDING = 4  # pixels that crop-flip adds on every side before it crops


def normaliser(input_: Input, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """(pixel - mean) / std by channel, for images of this dtype on this device: [B, channels, H, W] -> float32."""
    unit = 255.0 if dtype == torch.uint8 else 1.0
    shift, scale = (torch.tensor(v, device=device).mul(unit).view(-1, 1, 1) for v in (input_.mean, input_.std))
    return lambda images: torch.sub(images, shift).div_(scale)  # promotes uint8 to float32 on the way


def draw_crop_flips(count: int, rng: torch.Generator) -> Tensor:
    """[count, 3] int64 on the CPU: top and left edge of the crop in the padded image, and 1 for a flip."""
    edges = torch.randint(2 * PADDING + 1, (count, 2), generator=rng)
    return torch.cat((edges, torch.randint(2, (count, 1), generator=rng)), dim=1)


def crop_flip(images: Tensor, moves: Tensor) -> Tensor:
    """Every image cropped from itself in a black border, then flipped left to right or not.

    Args:
        images: [B, channels, H, W], raw pixels: the border is 0 before normalisation.
        moves: [B, 3] as of `draw_crop_flips`, on the images' device.
    """
    count, channels, height, width = images.shape
    bordered = pad(images, (PADDING,) * 4)
    top, left, flip = moves.T.unsqueeze(2)  # [B, 1] each
    rows, columns = (torch.arange(n, device=images.device) for n in (height, width))
    columns = left + torch.where(flip == 1, width - 1 - columns, columns)  # [B, W]
    flat = (top + rows).unsqueeze(2) * bordered.shape[3] + columns.unsqueeze(1)  # [B, H, W]: where a pixel comes from
    index = flat.view(count, 1, -1).expand(-1, channels, -1)
    return bordered.flatten(2).gather(2, index).view(images.shape)
