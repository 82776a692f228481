"""Tables that recipes, settings and policies share: strict ones, a name with options, and `[input]`."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    model_validator,
)

from protofed.common.config.transforms import MAX_TRANSFORMS, check_transform, is_random
from protofed.common.errors import ConfigError

# Any input becomes a str first, which is always valid: an error of validation would quote it.
Secret: TypeAlias = Annotated[SecretStr, BeforeValidator(str)]

Share = Annotated[float, Field(gt=0, le=1)]
Mean = Annotated[float, Field(ge=-1000, le=1000)]
Std = Annotated[float, Field(ge=1e-6, le=1000)]
Level = Annotated[float, Field(ge=-1e6, le=1e6)]
Width = Annotated[float, Field(gt=0, le=1e6)]
# Bounds of what a recipe from a server may make a site allocate or walk through.
MAX_IMAGE_VALUES = 1 << 24  # of one image, in all channels
MAX_TEXT, MAX_VALUES, MAX_DEPTH, MAX_NUMBER = 200, 1000, 4, 1e12  # characters, values of a list, lists in lists


class StrictModel(BaseModel):
    """A TOML table whose keys are all known and whose numbers are all finite: JSON has no others."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class OpenTable(BaseModel):
    """A table whose keys beyond its fields are options, which whoever is named in it checks."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @model_validator(mode="after")
    def _plain(self) -> Self:
        for name, value in self.options.items():
            _check_plain(name, value)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """All keys of the table but its fields."""
        return dict(self.model_extra or {})


class NamedOptions(OpenTable):
    """A name with options, which the registry of that name checks: `[method]` and `[model]`."""

    name: Annotated[str, Field(max_length=MAX_TEXT)]


class NamedTransform(OpenTable):
    """A transform of images with its options: one of `config.transforms`, or a plug-in."""

    transform: Annotated[str, Field(max_length=MAX_TEXT)]

    @model_validator(mode="after")
    def _known(self) -> Self:
        try:
            check_transform(self.transform, self.options)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self


class Model(NamedOptions):
    """`[model]`: a name with options, and what the model's body begins with."""

    pretrained_body: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = (
        None  # BLAKE3 of the file with the body that the run starts from; every site has this file
    )


def _check_plain(name: str, value: object, depth: int = 0) -> None:
    """Options come over the wire: their numbers are finite, and none is larger than any method or model needs."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if len(items) > MAX_VALUES or depth > MAX_DEPTH or (isinstance(value, str) and len(value) > MAX_TEXT):
        raise ValueError(
            f"{name[:40]} is larger than any option: expected at most {MAX_VALUES} values, {MAX_TEXT} characters"
        )
    if (
        isinstance(value, int | float) and not abs(value) <= MAX_NUMBER
    ):  # `not <=` rather than `>`: NaN compares false with everything
        raise ValueError(f"{name[:40]}: expected a finite number of at most {MAX_NUMBER:g}")
    for item in items:
        _check_plain(name, item, depth + 1)


class EveryFrame(StrictModel):
    """`frames = { every = n }`: the first frame of a file, and each n-th frame after it, is an example."""

    every: Annotated[int, Field(ge=1, le=10_000)]  # frames from one example to the next


FrameRule: TypeAlias = Literal["one", "middle", "max", "mean", "all"]


def _frames_tag(value: Any) -> str | None:
    if isinstance(value, EveryFrame) or (isinstance(value, dict) and len(value) == 1):
        return "table"
    return "name" if value in get_args(FrameRule) else None


Frames: TypeAlias = Annotated[
    Annotated[FrameRule, Tag("name")] | Annotated[EveryFrame, Tag("table")],
    Discriminator(
        _frames_tag,
        custom_error_type="frames",
        custom_error_message='expected "one", "middle", "max", "mean", "all", or { every = n }',
    ),
]


class Input(StrictModel):
    """`[input]`: the shape and normalisation that every site brings its images to; the run fixes it for all sites."""

    shape: tuple[int, int, int]  # channels, height, width
    mean: tuple[Mean, ...] = (0.5,)  # mean of pixels in 0..1, by channel; one value serves all channels
    std: tuple[Std, ...] = (0.5,)  # std of pixels in 0..1, by channel; pixels become (pixel - mean) / std
    fit: Literal["exact", "stretch", "crop", "pad"] = (
        "exact"  # what happens to images of another size; exact: they are refused
    )
    colours: Literal["exact", "convert"] = (
        "exact"  # what happens to grey images in a colour run, or the reverse; exact: they are refused
    )
    window: tuple[Level, Width] | None = (
        None  # centre and width of the values that become 0..1, in the files' own units
    )
    # Left out at their defaults: recipes without them keep the digests that they had before the keys came.
    frames: Annotated[Frames, Field(exclude_if=lambda frames: frames == "one")] = (
        "one"  # which frames of a file or series count as images; one: a file of several frames is refused
    )
    prepare: Annotated[
        tuple[NamedTransform, ...], Field(max_length=MAX_TRANSFORMS, exclude_if=lambda steps: not steps)
    ] = ()  # transforms of each decoded image, before `fit`; all deterministic

    @model_validator(mode="after")
    def _prepared_alike(self) -> Input:
        if random := [step.transform for step in self.prepare if is_random(step.transform)]:
            raise ValueError(
                f"prepare: {random[0]} is random, and every site must prepare an image alike each time; expected a "
                "deterministic transform. Random ones belong into plan.augmentation"
            )
        return self

    @model_validator(mode="after")
    def _channels(self) -> Input:
        if min(self.shape) < 1 or any(len(values) not in (1, self.shape[0]) for values in (self.mean, self.std)):
            raise ValueError("expected shape = [channels, height, width] and mean, std of one value or one a channel")
        if math.prod(self.shape) > MAX_IMAGE_VALUES:
            raise ValueError(f"shape = {list(self.shape)}: expected at most {MAX_IMAGE_VALUES:,} values an image")
        return self
