"""The transforms of a recipe, made ready: one of torchvision's or MONAI's that the recipe may name, or a plug-in."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from protofed.common.config.tables import NamedTransform
from protofed.common.config.transforms import OPTIONS, is_shipped
from protofed.common.errors import ConfigError, DataError
from protofed.common.plugins import PluginKind, error_line, load
from protofed.common.process import quiet_mlflow
from protofed.common.version import install_hint

ImageFunction: TypeAlias = Callable[[Tensor], Tensor]  # [channels, H, W] -> [channels, H', W']
_LIBRARIES = {"torchvision": "torchvision.transforms.v2", "monai": "monai.transforms"}
_EXTRAS = {"torchvision": "client", "monai": "monai"}


@dataclass(frozen=True, eq=False)
class ReadyTransform:
    """One transform, built from its options.

    Attributes:
        name: as the recipe has it.
        function: called with one image at a time.
        use: hands it the generator that it draws from, as MONAI's random transforms take one; None: it takes none.
        is_plugin: nobody has checked what it does.
    """

    name: str
    function: ImageFunction
    use: Callable[[np.random.RandomState], object] | None
    is_plugin: bool

    def __call__(self, image: Tensor) -> Tensor:
        """Transform an image [channels, H, W] of uint8, or float32 in 0..1.

        Raises:
            DataError: it raised something, or its result is no image with as many channels.
        """
        try:
            result = self.function(image.clone())  # MONAI's RandCoarseShuffle writes into its image
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # foreign code: it may raise anything
            raise DataError(
                f"transform '{self.name}' failed on an image {_describe(image)}: {error_line(error)}. Correct its "
                "options, or the transforms before it"
            ) from error
        if not isinstance(result, Tensor) or result.ndim != 3 or len(result) != len(image) or not result.numel():
            raise DataError(
                f"transform '{self.name}' made {_describe(result)} of an image {_describe(image)}; expected a tensor "
                f"[{len(image)}, height, width]. Correct its options, or the plug-in"
            )
        return result.as_subclass(Tensor)  # MONAI's own class would carry the history of each image


def build_transform(named: NamedTransform) -> ReadyTransform:
    """Make a transform ready.

    Raises:
        ConfigError: its library is not installed, its options do not fit, or it is a plug-in that is not allowed or
            cannot be imported.
    """
    name, options = named.transform, named.options
    make = _find_class(name) if is_shipped(name) else load(PluginKind.TRANSFORM, name, OPTIONS)
    try:
        function = make(**options)
    except Exception as error:  # of options that the tables allow by name, and of foreign code
        raise ConfigError(
            f"transform '{name}' cannot be made of the options {options}: {error_line(error)}. Correct the recipe"
        ) from error
    if not callable(function):
        raise ConfigError(f"transform '{name}' made a {type(function).__name__}: expected a function of an image")
    use = getattr(function, "set_random_state", None)
    return ReadyTransform(
        name,
        _on_floats(function) if name.startswith("monai/") else function,
        None if use is None else lambda state: use(state=state),
        not is_shipped(name),
    )


def describe_problem(image: Tensor) -> str:
    """What is wrong with the values of an image [channels, H, W]; empty: it is of uint8, or of floats in 0..1."""
    if image.dtype == torch.uint8:
        return ""
    if not image.is_floating_point():
        return f"values of {image.dtype}"
    if not bool(image.isfinite().all()):
        return "values that are no numbers"
    low, high = (float(value) for value in image.aminmax())
    # Interpolation rounds; what lies further outside was never in 0..1.
    return "" if low >= -1e-4 and high <= 1 + 1e-4 else f"values from {low:.4g} to {high:.4g}"


@contextmanager
def forked_generators(device: torch.device) -> Iterator[Callable[[int], np.random.RandomState]]:
    """Within the block, the default generators of PyTorch, NumPy and Python may be seeded; then they are as before.

    Yields:
        Seed all of them by one number of 0..2^63 - 1; returns a generator for transforms that take one.
    """
    python, numpy = random.getstate(), np.random.get_state()

    def seed(number: int) -> np.random.RandomState:
        torch.default_generator.manual_seed(number)
        if device.type == "cuda":
            torch.cuda.manual_seed(number)
        random.seed(number)
        low, high = number & 0xFFFFFFFF, number >> 32
        np.random.seed(low)
        return np.random.RandomState([low, high])  # another stream than NumPy's default generator has now

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield seed
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _find_class(name: str) -> Callable[..., Any]:
    library, _, class_name = name.partition("/")
    quiet_mlflow()
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(_LIBRARIES[library]), class_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"transform '{name}' needs its library: {install_hint(_EXTRAS[library])}") from error
    except AttributeError as error:
        raise ConfigError(f"the installed {library} has no {class_name}; {install_hint(_EXTRAS[library])}") from error
    return found


def _on_floats(function: ImageFunction) -> ImageFunction:
    """MONAI's intensities mean 0..1 at every site, whether its files have 8 bits or more."""
    return lambda image: function(image / 255 if image.dtype == torch.uint8 else image)


def _describe(value: object) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
