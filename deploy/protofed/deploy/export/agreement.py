"""Check that what is written predicts as the model does, before it is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.client.models.inference import DeployedModel, predict, rebuild
from protofed.common.config.tables import Input, NamedOptions
from protofed.common.errors import ConfigError, ProtofedError

Answer: TypeAlias = Callable[[NDArray[np.float32]], NDArray[np.float32]]  # pixels [N, ...] -> probabilities [N, C]
BATCH_SIZES = (1, 3, 8)  # images per batch; one, and sizes other than the 2 with which ONNX is traced
TOLERANCE = 1e-4  # of probabilities; float32 sums in another order differ by less than 1e-5


class ExportError(ProtofedError):
    """A file and the model give different probabilities; nothing was written."""

    exit_code = 1


def difference(model: DeployedModel, images: Input, answer: Answer, seed: int = 0) -> float:
    """The largest absolute difference of probabilities between the model and a file, on uniform random images.

    Args:
        answer: what the file computes.

    Raises:
        ExportError: they differ by more than rounding.
    """
    rng, worst = np.random.default_rng(seed), 0.0
    for count in BATCH_SIZES:
        pixels = rng.random((count, *images.shape), dtype=np.float32)
        _, expected = predict(model, pixels)
        worst = max(worst, float(np.abs(answer(pixels) - expected.numpy()).max()))
    if math.isnan(worst) or worst > TOLERANCE:
        raise ExportError(
            f"the exported file and the model differ by {worst:.1e} in probabilities; expected at most {TOLERANCE}"
        )
    return worst


def check_weights(
    model: DeployedModel, choice: NamedOptions, images: Input, classes: int, allowed: frozenset[str]
) -> None:
    """Check that the model can be made again from its weights, as `protofed predict` makes it.

    Args:
        choice: the architecture, with options.
        allowed: plug-ins that may be imported; the head's class already is.

    Raises:
        ConfigError: the head cannot be made again.
        ExportError: it can, and predicts something else.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            again = rebuild(choice, images, classes, model.head, model.weights(), allowed | {model.head})
    except ConfigError as error:
        raise ConfigError(
            f"{error}; a method's own head derives from MethodHead of protofed.client.method, and says how it is made: "
            "do that, or take --format onnx"
        ) from error
    difference(model, images, lambda pixels: predict(again, pixels)[1].numpy())
