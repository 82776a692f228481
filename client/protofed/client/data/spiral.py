"""Points on the arms of a spiral, a class an arm: an example whose embedding can be drawn (Dai et al., AAAI 2023)."""

from __future__ import annotations

import numpy as np
import torch

from protofed.client.data.site_data import Examples

ARMS = 6
EACH = 800  # points an arm
_TURN = 0.55 * 2 * np.pi  # of an arm from its inner to its outer end
_NOISE = 0.1  # standard deviation of the angle, in radians; arms are 1.05 apart


def spiral(seed: int) -> Examples:
    """4,800 points of 6 classes as images [1, 1, 2]: x and y in 0..1, around (0.5, 0.5)."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(ARMS), EACH)
    along = rng.uniform(0, 1, len(labels))  # 0: the inner end, 1: the outer one
    angle = 2 * np.pi * labels / ARMS + _TURN * along + rng.normal(0, _NOISE, len(labels))
    radius = 0.05 + 0.45 * along
    points = 0.5 + radius[:, None] * np.stack((np.cos(angle), np.sin(angle)), axis=1)  # [N, 2]
    images = torch.from_numpy(points.astype(np.float32)).reshape(-1, 1, 1, 2)
    return Examples(images, torch.from_numpy(labels))
