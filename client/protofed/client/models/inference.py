"""A model as it is used after a run: pixels in, probabilities out, without what only training needs."""

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

# What stands behind the body: the architecture's own classifier, cosines to prototypes, or distances to them.
Head: TypeAlias = Literal["own", "cosine", "nearest"]


class NearestHead(nn.Module):
    """Minus the Euclidean distance to each prototype: FedPRP (Guo et al., TNNLS 2024, eq. 12).

    What `PrototypeHead` computes, written without a branch and without `cdist`, so that it can be exported.

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
    """A model with the run's normalisation in front of it and a softmax behind it, in evaluation mode.

    Attributes:
        model: body and head; its tensors are all that is trained.
        head: which kind of head it has.
    """

    mean: Tensor  # [channels or 1, 1, 1]
    std: Tensor

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
        """What was trained, as BODY and HEAD."""
        return {Part.BODY: dump(self.model.body), Part.HEAD: dump(self.model.head)}


def rebuilt(
    choice: NamedOptions,
    images: Input,
    classes: int,
    head: Head,
    weights: Payload,
    allowed: frozenset[str] = frozenset(),
) -> DeployedModel:
    """The model that `DeployedModel.weights` was taken of.

    Args:
        allowed: own factories that may be imported.

    Raises:
        ConfigError: the architecture is not known, not allowed, or other than that of the weights.
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
    """Load what a site's fit left (BODY and HEAD) into a fresh model, the method's head around or in place of its own.

    Args:
        by_own: of a head with prototypes, predict with the private one.

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
    """What a head predicts with, and nothing else."""
    if isinstance(head, PrototypeHead):
        if head.by_own or not head.known.any():
            return head.own, "own"
        return NearestHead(head.prototypes, head.known), "nearest"
    if isinstance(head, NearestHead):
        return head, "nearest"
    return head, "cosine" if isinstance(head, CosineHead) else "own"


def answers(model: DeployedModel, pixels: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> list[Tensor]:
    """Logits and probabilities, [B, C] each, for pixels [B, channels, H, W] in 0..1, wherever the model is."""
    with torch.inference_mode():
        given = torch.from_numpy(pixels).to(model.mean.device)
        return [cast("Tensor", found).float().cpu() for found in model(given)]
