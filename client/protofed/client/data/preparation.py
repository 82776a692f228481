"""The run's preparation of decoded images: `input.prepare`, deterministic transforms in their order."""

from __future__ import annotations

from functools import lru_cache
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.client.data.transforms import ReadyTransform, build_transform, describe_problem, forked_generators
from protofed.common.config.tables import Input
from protofed.common.errors import DataError

Planes: TypeAlias = NDArray[Any]  # [channels, H, W], uint8, or float32 in 0..1
_SEEDS = (1, 2)  # under both, a plug-in must give the same image
_CPU = torch.device("cpu")


class Preparation:
    """The transforms of one `[input]`. Equal images give equal results, from any thread.

    Attributes:
        transforms: in their order.
    """

    def __init__(self, transforms: tuple[ReadyTransform, ...]) -> None:
        self.transforms = transforms
        self._unchecked = [transform for transform in transforms if transform.is_plugin]
        self._lock = Lock()

    @classmethod
    def of(cls, input_: Input) -> Preparation:
        """The preparation of an input; one for equal inputs.

        Raises:
            ConfigError: as `build_transform`.
        """
        return _build(input_)

    def __call__(self, pixels: Planes) -> Planes:
        """Prepare one image: [channels, H, W] -> [channels, H', W'], uint8, or float32 in 0..1.

        Raises:
            DataError: a transform failed, gave something else than such an image, or is random.
        """
        image = torch.from_numpy(np.array(pixels))  # writable, as PyTorch asks
        with torch.no_grad():
            for transform in self.transforms:
                image = self._apply(transform, image)
        return image.numpy()

    def _apply(self, transform: ReadyTransform, image: Tensor) -> Tensor:
        result = transform(image)
        if problem := describe_problem(result):
            raise DataError(
                f"transform '{transform.name}' made {problem} of an image; expected uint8, or floats from 0 to 1. "
                "Correct its options, such as the range of its results, or the plug-in"
            )
        with self._lock:  # another thread's image may be the first, too; and seeds are the whole process's
            if transform in self._unchecked:
                _check_deterministic(transform, image)
                self._unchecked.remove(transform)
        return result if result.dtype == torch.uint8 else result.float().clamp(0, 1)


@lru_cache(maxsize=8)
def _build(input_: Input) -> Preparation:
    return Preparation(tuple(map(build_transform, input_.prepare)))


def _check_deterministic(transform: ReadyTransform, image: Tensor) -> None:
    """Raises DataError: two calls with the same image, under other seeds, give different images."""
    results = []
    with forked_generators(_CPU) as seed:
        for number in _SEEDS:
            seed(number)
            results.append(transform(image))
    if not torch.equal(*results):
        raise DataError(
            f"transform '{transform.name}' gives another result each time. A preparation must be deterministic, so "
            "that an image is the same whenever it is read. Remove its randomness, or name it in plan.augmentation"
        )
