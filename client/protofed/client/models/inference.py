"""A trained model for prediction: pixels in, the task's predictions out, without what only training needs."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from protofed.client.models.catalogue import build
from protofed.client.models.split import MethodHead, SplitModel, blank_head, dump, load, name_head
from protofed.client.task import ClientTask, build_client_task
from protofed.common.config.tables import Input, NamedOptions
from protofed.common.errors import CodecError, ConfigError
from protofed.common.payload import Part, Payload


class DeployedModel(nn.Module):
    """The run's normalisation, a trained model and what its task predicts, in evaluation mode.

    Attributes:
        model: body and head, as deployed; only these have trained tensors.
        head: the kind of the model's head, as of `name_head`.
    """

    mean: Tensor  # [channels or 1, 1, 1]
    std: Tensor  # [channels or 1, 1, 1]

    def __init__(self, model: SplitModel, images: Input, task: ClientTask) -> None:
        super().__init__()
        self.model, self._task = model, task
        if isinstance(model.head, MethodHead):
            self.model.head = model.head.deployed()
        self.head = name_head(self.model.head)
        self.register_buffer("mean", torch.tensor(images.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(images.std).view(-1, 1, 1), persistent=False)
        self.eval().requires_grad_(False).to(memory_format=torch.contiguous_format)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels in 0..1, [B, channels, H, W] -> the model's outputs and the task's predictions, [B, C] each."""
        outputs = self.model(pixels.sub(self.mean).div(self.std))
        return outputs, self._task.predict(outputs)

    def weights(self) -> Payload:
        """The trained tensors of any shapes, as BODY and HEAD."""
        return {Part.BODY: dump(self.model.body), Part.HEAD: dump(self.model.head)}


def rebuild(
    choice: NamedOptions,
    images: Input,
    classes: int,
    head: str,
    weights: Payload,
    task: NamedOptions,
    allowed: frozenset[str] = frozenset(),
) -> DeployedModel:
    """The model whose `DeployedModel.weights` these are.

    Args:
        choice: the architecture, with options.
        images: what the model is given, with its normalisation.
        head: the kind of head that the weights are of.
        weights: tensors as of `DeployedModel.weights`.
        task: what the model learnt, as of a recipe's [task].
        allowed: plug-ins that may be imported.

    Raises:
        ConfigError: the task, the architecture or the head is unknown, not allowed, or not that of the weights.
    """
    model = build(choice, images, classes, allowed)
    try:
        model.head = blank_head(head, model.head, allowed)
        load(model.body, weights[Part.BODY])
        load(model.head, weights[Part.HEAD])
    except (CodecError, KeyError, AttributeError) as error:
        raise ConfigError(f"the weights are not those of model '{choice.name}' with head '{head}': {error}") from error
    return DeployedModel(model, images, build_client_task(task, allowed))


def predict(model: DeployedModel, pixels: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> list[Tensor]:
    """Outputs and predictions, [B, C] each on the CPU, of pixels [B, channels, H, W] in 0..1; on any device."""
    with torch.inference_mode():
        batch = torch.from_numpy(pixels).to(model.mean.device)
        return [cast("Tensor", output).float().cpu() for output in model(batch)]
