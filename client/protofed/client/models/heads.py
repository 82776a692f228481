"""Heads with prototypes, which methods put in place of a model's linear one."""

from __future__ import annotations

from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from protofed.client.models.split import SplitModel
from protofed.common.errors import CodecError
from protofed.common.payload import Array

H = TypeVar("H", bound=nn.Module)
EXACT = "donot_use_mm_for_euclid_dist"  # mode of torch.cdist: its matrix product cancels digits of near neighbours


class CosineHead(nn.Module):
    """`scale * unit(features) @ prototypes.T`, without bias: FedNH's model (Dai et al., AAAI 2023, section 4.1).

    The state dict holds `prototypes` [C, D] and `scale` [], whether the scale is learnable or not. Features are
    normalised here, so a body may or may not do it: unit vectors stay what they are. A zero feature gives zero logits.

    Args:
        prototypes: one row a class, [C, D], copied; frozen: a buffer, so no optimizer sees it. Rows are used as they
            are: unit length is the caller's to give.
        scale: the logit scale s, one number; converted to the prototypes' dtype and device.
        fixed: the scale is a buffer; otherwise it is a parameter (as in the authors' runs, METHODS 1.2).

    Raises:
        CodecError: prototypes that are no matrix of floats, or a scale of more than one number: the server sends both.
    """

    prototypes: Tensor  # [C, D]
    scale: Tensor  # []

    def __init__(self, prototypes: Tensor | Array, scale: float | Tensor, fixed: bool) -> None:
        super().__init__()
        # np.array: received arrays may be read-only views of a blob, which torch must never alias.
        rows = torch.from_numpy(np.array(prototypes)) if isinstance(prototypes, np.ndarray) else prototypes
        rows = rows.detach().clone()
        if rows.ndim != 2 or not rows.is_floating_point():
            raise CodecError(
                f"prototypes are {tuple(rows.shape)} of {rows.dtype}: expected floats, [classes, features]"
            )
        s = torch.as_tensor(scale).detach().to(rows, copy=True)
        if s.numel() != 1:
            raise CodecError(f"scale is {tuple(s.shape)}: expected one number")
        self.register_buffer("prototypes", rows)
        if fixed:
            self.register_buffer("scale", s.reshape(()))
        else:
            self.scale = nn.Parameter(s.reshape(()))

    @classmethod
    def of(cls, model: SplitModel) -> CosineHead:
        """A model's head, which `like` must have made."""
        return _checked(model, cls)

    @classmethod
    def like(cls, head: nn.Module, fixed: bool) -> CosineHead:
        """A head to load into, with shape [C, D], dtype and device of a linear head or of an earlier cosine head."""
        state = head.state_dict()
        rows: Tensor = state["prototypes" if "prototypes" in state else "weight"]
        return cls(torch.zeros_like(rows), 1.0, fixed)

    def forward(self, features: Tensor) -> Tensor:
        """Logits, [B, D] -> [B, C]; `eps` of the norm is 1e-12, as in the released code."""
        return self.scale * (normalize(features, dim=-1) @ self.prototypes.T)


class PrototypeHead(nn.Module):
    """Nearest-prototype classification around a model's own head: FedPRP (Guo et al., TNNLS 2024, eq. 12).

    The state dict holds `own.*`, `prototypes` [C, D] and `known` [C]: a stored model can predict either way.

    Args:
        own: the model's linear head, which is trained.
        classes: C.
        by_own: predict with `own` rather than with prototypes.
    """

    prototypes: Tensor  # [C, D]
    known: Tensor  # [C], 1 for a class that has a prototype, else 0

    def __init__(self, own: nn.Module, classes: int, by_own: bool = False) -> None:
        super().__init__()
        self.own, self.by_own = own, by_own
        weight = own.get_parameter("weight")
        self.register_buffer("prototypes", torch.zeros(classes, weight.shape[1]).to(weight))
        self.register_buffer("known", torch.zeros(classes).to(weight))

    @classmethod
    def around(cls, head: nn.Module, classes: int, by_own: bool) -> PrototypeHead:
        """`head` itself if it is a PrototypeHead, else a new one around it."""
        if not isinstance(head, PrototypeHead):
            return cls(head, classes, by_own)
        head.by_own = by_own
        return head

    @classmethod
    def of(cls, model: SplitModel) -> PrototypeHead:
        """A model's head, which `around` must have made."""
        return _checked(model, cls)

    def set_prototypes(self, prototypes: Tensor, known: Tensor) -> None:
        """Classify by these prototypes, [C, D], of the classes that `known` [C] marks."""
        self.prototypes.copy_(prototypes)
        self.known.copy_(known)

    def forward(self, features: Tensor) -> Tensor:
        """[B, D] -> [B, C]: minus the Euclidean distance to each prototype, minus infinity for a class without one.

        With `by_own`, and while no class has a prototype, the linear head's logits.
        """
        if self.by_own or not self.known.any():
            return cast("Tensor", self.own(features))
        return -torch.cdist(features, self.prototypes, compute_mode=EXACT).masked_fill(self.known == 0, torch.inf)


def _checked(model: SplitModel, kind: type[H]) -> H:
    if not isinstance(model.head, kind):
        raise TypeError(f"the head is a {type(model.head).__name__}: expected a {kind.__name__}")
    return model.head
