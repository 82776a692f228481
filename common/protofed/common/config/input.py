"""`[input]`: what every site's images are brought to before the model sees them; the run fixes it for all sites."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from protofed.common.config.table import StrictModel

MOST_VALUES = 1 << 24  # of one image, in all channels
Mean = Annotated[float, Field(ge=-1000, le=1000)]
Std = Annotated[float, Field(ge=1e-6, le=1000)]
Level = Annotated[float, Field(ge=-1e6, le=1e6)]
Width = Annotated[float, Field(gt=0, le=1e6)]


class Input(StrictModel):
    """What every site's images are brought to; the run fixes it for all sites."""

    shape: tuple[int, int, int]  # channels, height, width
    mean: tuple[Mean, ...] = (0.5,)  # by channel, of pixels in 0..1; one value serves all channels
    std: tuple[Std, ...] = (0.5,)  # likewise; pixels become (pixel - mean) / std
    fit: Literal["exact", "stretch", "crop", "pad"] = "exact"  # images of another size; exact: refused
    colours: Literal["exact", "convert"] = "exact"  # grey where colour is meant, or the other way round
    window: tuple[Level, Width] | None = None  # centre and width, in the files' own units, that become 0..1

    @model_validator(mode="after")
    def _channels(self) -> Input:
        if min(self.shape) < 1 or any(len(values) not in (1, self.shape[0]) for values in (self.mean, self.std)):
            raise ValueError("expected shape = [channels, height, width] and mean, std of one value or one a channel")
        if math.prod(self.shape) > MOST_VALUES:
            raise ValueError(f"shape = {list(self.shape)}: expected at most {MOST_VALUES:,} values an image")
        return self
