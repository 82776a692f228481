"""FEDIC's calibration network: what an ensemble of sites' models makes of images, calibrated class by class.

Shang et al., ICME 2022, section 3.3 (METHODS §5.14).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from protofed.client.models.split import SplitModel, held
from protofed.common.errors import CodecError
from protofed.common.payload import Part, Payload

Compute: TypeAlias = Callable[[Tensor], Tensor]


class CalibrationNetwork(nn.Module):
    """Mixes K models' logits by weights, calibrates each class, and mixes the result with a fine-tuned model's logits.

    Its parameters start at what needs no training: the plain mean of the models, as it is, and half of either.

    Args:
        classes: C.
        features: D.
    """

    def __init__(self, classes: int, features: int) -> None:
        super().__init__()
        self.weigh = nn.Linear(classes, 1)  # a, b
        self.scale = nn.Parameter(torch.ones(classes))
        self.bias = nn.Parameter(torch.zeros(classes))
        self.gate = nn.Linear(features, 1)  # u, v
        for layer in (self.weigh, self.gate):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, logits: Tensor, features: Tensor, tuned: Tensor) -> Tensor:
        """Calibrated logits [B, C].

        Args:
            logits: of the sites' models, [K, B, C].
            features: of their bodies, [K, B, D].
            tuned: logits of the model that was fine-tuned, [B, C].
        """
        weights = torch.sigmoid(self.weigh(logits))  # e_k [K, B, 1]
        ensemble = (weights / weights.sum(0) * logits).sum(0)
        calibrated = self.scale * ensemble + self.bias
        gate = torch.sigmoid(self.gate(features.mean(0)))  # [B, 1]
        return gate * calibrated + (1 - gate) * tuned


class CalibratedEnsemble(nn.Module):
    """The calibration network on what sites' models and a fine-tuned one make of images; only the network is trained.

    Args:
        model: whose body and head compute for all of them; its own numbers stay.
        sites: BODY and HEAD of each site's model.
        tuned: BODY and HEAD of the fine-tuned one.

    Raises:
        CodecError: there are no sites' models.
    """

    def __init__(self, model: SplitModel, sites: Sequence[Payload], tuned: Payload) -> None:
        super().__init__()
        if not sites:
            raise CodecError("an ensemble of no models: expected the sites' models of the round")
        self._sites, self._tuned = [_halves(model, site) for site in sites], _halves(model, tuned)
        weight = model.head.get_parameter("weight")  # [C, D]
        self.network = CalibrationNetwork(*weight.shape).to(weight)

    def forward(self, images: Tensor) -> Tensor:
        """Calibrated logits, [B, channels, H, W] -> [B, C]."""
        features = [embed(images) for embed, _ in self._sites]  # [B, D] of each
        logits = [classify(z) for (_, classify), z in zip(self._sites, features, strict=True)]
        embed, classify = self._tuned
        return cast("Tensor", self.network(torch.stack(logits), torch.stack(features), classify(embed(images))))


def _halves(model: SplitModel, payload: Payload) -> tuple[Compute, Compute]:
    return held(model.body, payload[Part.BODY]), held(model.head, payload[Part.HEAD])
