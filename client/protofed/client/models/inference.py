"""A trained model for prediction: pixels in, probabilities out, without what only training needs."""

from __future__ import annotations

from typing import Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from protofed.client.models.catalogue import build
from protofed.client.models.heads import CosineHead, PrototypeHead
from protofed.client.models.split import SplitModel, dump, load
from protofed.common.config.recipe import Input, NamedOptions
from protofed.common.errors import CodecError, ConfigError
from protofed.common.payload import Part, Payload

# What turns features into logits: the architecture's own classifier, cosines to prototypes, or distances to them.
Head: TypeAlias = Literal["own", "cosine", "nearest"]


class NearestHead(nn.Module):
    """Minus the Euclidean distance to each prototype: FedPRP (Guo et al., TNNLS 2024, eq. 12).

    Computes what `PrototypeHead` does, without a branch and without `cdist`, so that it can be exported to ONNX.

    Args:
        prototypes: one row a class, [C, D].
        known: [C], 1 for a class that has a prototype, else 0; at least one.
    """

    prototypes: Tensor  # [C, D]
    known: Tensor  # [C]

    def __init__(self, prototypes: Tensor, known: Tensor) -> None:
        super().__init__()
        self.register_buffer("prototypes", prototypes.detach().clone())
        self.register_buffer("known", known.detach().clone())

    def forward(self, features: Tensor) -> Tensor:
        """[B, D] -> [B, C]; minus infinity for a class without a prototype."""
        distances: Tensor = torch.linalg.vector_norm(features.unsqueeze(1) - self.prototypes, dim=2)
        return -distances.masked_fill(self.known == 0, torch.inf)


class DeployedModel(nn.Module):
    """The run's normalisation, a trained model and a softmax, in evaluation mode.

    Attributes:
        model: body and head; only these have trained tensors.
        head: the kind of the model's head.
    """

    mean: Tensor  # [channels or 1, 1, 1]
    std: Tensor  # [channels or 1, 1, 1]

    def __init__(self, model: SplitModel, images: Input) -> None:
        super().__init__()
        self.model = model
        self.model.head, self.head = _simplified(model.head)
        self.register_buffer("mean", torch.tensor(images.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(images.std).view(-1, 1, 1), persistent=False)
        self.eval().requires_grad_(False).to(memory_format=torch.contiguous_format)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels in 0..1, [B, channels, H, W] -> logits and probabilities, [B, C] each."""
        logits = self.model(pixels.sub(self.mean).div(self.std))
        return logits, logits.softmax(1)

    def weights(self) -> Payload:
        """The trained tensors of any shapes, as BODY and HEAD."""
        return {Part.BODY: dump(self.model.body), Part.HEAD: dump(self.model.head)}


def rebuild(
    choice: NamedOptions,
    images: Input,
    classes: int,
    head: Head,
    weights: Payload,
    allowed: frozenset[str] = frozenset(),
) -> DeployedModel:
    """The model whose `DeployedModel.weights` these are.

    Args:
        choice: the architecture, with options.
        images: what the model is given, with its normalisation.
        head: the kind of head that the weights are of.
        weights: tensors as of `DeployedModel.weights`.
        allowed: plug-ins that may be imported.

    Raises:
        ConfigError: the architecture is unknown, not allowed, or not that of the weights.
    """
    model = build(choice, images, classes, allowed)
    try:
        model.head = _blank(model.head, head, classes)
        load(model.body, weights[Part.BODY])
        load(model.head, weights[Part.HEAD])
    except (CodecError, KeyError, AttributeError) as error:
        raise ConfigError(f"the weights are not those of model '{choice.name}' with head '{head}': {error}") from error
    return DeployedModel(model, images)


def put_head(model: SplitModel, weights: Payload, classes: int, *, by_own: bool) -> None:
    """Load a site's own model (BODY and HEAD) into a fresh one, whose head becomes one of the method's kind.

    Args:
        weights: tensors of any shapes, as the site's fit left them; their names tell the kind of head.
        by_own: predict with the site's linear head rather than with prototypes, where there are both.

    Raises:
        CodecError: the tensors are another model's.
    """
    names = weights[Part.HEAD].keys()
    if {"prototypes", "known"} <= names:
        model.head = PrototypeHead.around(model.head, classes, by_own)
    elif {"prototypes", "scale"} == names:
        model.head = CosineHead.like(model.head, fixed=True)
    load(model.body, weights[Part.BODY])
    load(model.head, weights[Part.HEAD])


def _blank(own: nn.Module, head: Head, classes: int) -> nn.Module:
    if head == "own":
        return own
    if head == "cosine":
        return CosineHead.like(own, fixed=True)
    width = own.get_parameter("weight").shape[1]
    return NearestHead(torch.zeros(classes, width), torch.zeros(classes))


def _simplified(head: nn.Module) -> tuple[nn.Module, Head]:
    """A head without what only training needs, and its kind."""
    if isinstance(head, PrototypeHead):
        if head.by_own or not head.known.any():
            return head.own, "own"
        return NearestHead(head.prototypes, head.known), "nearest"
    if isinstance(head, NearestHead):
        return head, "nearest"
    return head, "cosine" if isinstance(head, CosineHead) else "own"


def predict(model: DeployedModel, pixels: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> list[Tensor]:
    """Logits and probabilities, [B, C] each on the CPU, of pixels [B, channels, H, W] in 0..1; on any device."""
    with torch.inference_mode():
        batch = torch.from_numpy(pixels).to(model.mean.device)
        return [cast("Tensor", output).float().cpu() for output in model(batch)]
