"""Grey values of any depth to 0..1: by the run's window, or by what is white."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protofed.client.data.file_entry import UnreadableImageError

if TYPE_CHECKING:
    from PIL.Image import Image

GreyWindow: TypeAlias = tuple[float, float]  # a window: centre and width, in the files' own units


def linear(values: NDArray[Any], centre: float, width: float) -> NDArray[np.float64]:
    """Map the window to 0..1, the rest beyond: (values - centre) / width + 1/2 (LINEAR_EXACT, PS3.3 C.11.2.1.3.2)."""
    unit: NDArray[np.float64] = (values.astype(np.float64) - centre) / width + 0.5
    return unit


def windowed(values: NDArray[Any], window: GreyWindow) -> NDArray[np.float32]:
    """Values in 0..1 by a window, cut off at both ends."""
    return linear(values, *window).clip(0, 1).astype(np.float32)


def scaled(values: NDArray[Any], white: float | None, window: GreyWindow | None) -> NDArray[np.float32]:
    """Values in 0..1 by the run's window, or else by all that their bits can hold.

    Args:
        values: [H, W], in the file's own units.
        white: what is 1 without a window; None: only a window can say.

    Raises:
        UnreadableImageError: values that are no numbers, or that only a window could scale.
    """
    if not np.isfinite(values).all():
        raise UnreadableImageError("values that are no numbers")
    if window is not None:
        return windowed(values, window)
    if white is None:
        raise UnreadableImageError(
            "values of 32 bits or with a sign, which need input.window; expected 8 or 16 bits without a sign"
        )
    if values.min() < 0 or values.max() > white:
        raise UnreadableImageError(f"values outside 0 to {white:g}, which need input.window")
    return (values / white).astype(np.float32)


def float_image(plane: NDArray[np.float32]) -> Image:
    """A plane [H, W] as an image of mode F."""
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(plane))
