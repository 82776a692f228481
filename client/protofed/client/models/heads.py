"""Heads that methods put in place of a model's linear one: here those with prototypes, and what all of them have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Final, Literal, Self, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from protofed.client.models.split import SplitModel
from protofed.common.errors import CodecError, ConfigError
from protofed.common.payload import Array
from protofed.common.plugins import PluginKind, check_type, load

H = TypeVar("H", bound=nn.Module)
# How features are compared with prototypes: by their cosine, or by how far they are apart.
ComparedBy: TypeAlias = Literal["direction", "distance"]
OWN: Final = "own"  # the head that the architecture has
EXACT = "donot_use_mm_for_euclid_dist"  # mode of torch.cdist: its matrix product cancels digits of near neighbours


class MethodHead(nn.Module, ABC):
    """A head that a method puts in place of the model's own, [B, D] -> [B, C]; it says itself how it is exported.

    Attributes:
        compared_by: how it compares features with prototypes; None: it does not.

    Raises:
        TypeError: of a subclass inside a function: an exported model names it by its path.
    """

    compared_by: ClassVar[ComparedBy | None] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "<locals>" in cls.__qualname__:
            raise TypeError(f"head {cls.__qualname__} is inside a function: expected a class of a module, with a path")

    def deployed(self) -> nn.Module:
        """What computes the same logits without what only training needs; ONNX must have all of its operations."""
        return self

    @classmethod
    @abstractmethod
    def blank(cls, own: nn.Module) -> Self:
        """A head to load the state dict of a deployed one into, in place of the model's own, with `weight` [C, D]."""


class CosineHead(MethodHead):
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

    compared_by = "direction"
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
    def like(cls, head: nn.Module, fixed: bool) -> Self:
        """A head to load into, with shape [C, D], dtype and device of a linear head or of an earlier cosine head."""
        state = head.state_dict()
        rows: Tensor = state["prototypes" if "prototypes" in state else "weight"]
        return cls(torch.zeros_like(rows), 1.0, fixed)

    @classmethod
    def blank(cls, own: nn.Module) -> Self:
        """A head with fixed scale to load into, of the shape of `own`."""
        return cls.like(own, fixed=True)

    def forward(self, features: Tensor) -> Tensor:
        """Logits, [B, D] -> [B, C]; `eps` of the norm is 1e-12, as in the released code."""
        return self.scale * (normalize(features, dim=-1) @ self.prototypes.T)


class NearestHead(MethodHead):
    """Minus the Euclidean distance to each prototype: FedPRP (Guo et al., TNNLS 2024, eq. 12).

    Computes what `PrototypeHead` does, without a branch and without `cdist`, so that it can be exported to ONNX.

    Args:
        prototypes: one row a class, [C, D].
        known: [C], 1 for a class that has a prototype, else 0; at least one.
    """

    compared_by = "distance"
    prototypes: Tensor  # [C, D]
    known: Tensor  # [C]

    def __init__(self, prototypes: Tensor, known: Tensor) -> None:
        super().__init__()
        self.register_buffer("prototypes", prototypes.detach().clone())
        self.register_buffer("known", known.detach().clone())

    @classmethod
    def blank(cls, own: nn.Module) -> Self:
        """A head without prototypes to load into."""
        weight = own.get_parameter("weight")
        return cls(torch.zeros_like(weight), torch.zeros(len(weight)))

    def forward(self, features: Tensor) -> Tensor:
        """[B, D] -> [B, C]; minus infinity for a class without a prototype."""
        distances: Tensor = torch.linalg.vector_norm(features.unsqueeze(1) - self.prototypes, dim=2)
        return -distances.masked_fill(self.known == 0, torch.inf)


class PrototypeHead(MethodHead):
    """Nearest-prototype classification around a model's own head: FedPRP (Guo et al., TNNLS 2024, eq. 12).

    The state dict holds `own.*`, `prototypes` [C, D] and `known` [C]: a stored model can predict either way.

    Args:
        own: the model's linear head, which is trained.
        classes: C.
        by_own: predict with `own` rather than with prototypes.
    """

    compared_by = "distance"
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

    @classmethod
    def blank(cls, own: nn.Module) -> Self:
        """A head around `own` that has no prototypes yet."""
        return cls(own, len(own.get_parameter("weight")))

    def deployed(self) -> nn.Module:
        """The linear head or the prototypes, whichever it predicts with."""
        return self.own if self._by_own else NearestHead(self.prototypes, self.known)

    def set_prototypes(self, prototypes: Tensor, known: Tensor) -> None:
        """Classify by these prototypes, [C, D], of the classes that `known` [C] marks."""
        self.prototypes.copy_(prototypes)
        self.known.copy_(known)

    def forward(self, features: Tensor) -> Tensor:
        """[B, D] -> [B, C]: minus the Euclidean distance to each prototype, minus infinity for a class without one.

        With `by_own`, and while no class has a prototype, the linear head's logits.
        """
        if self._by_own:
            return cast("Tensor", self.own(features))
        return -torch.cdist(features, self.prototypes, compute_mode=EXACT).masked_fill(self.known == 0, torch.inf)

    @property
    def _by_own(self) -> bool:
        return self.by_own or not bool(self.known.any())


# Of what is exported; any other class is named by its path.
HEADS: Mapping[str, type[MethodHead]] = {"cosine": CosineHead, "nearest": NearestHead}


def kind_of(head: nn.Module) -> str:
    """The name by which an exported model has its deployed head: `own`, one of HEADS, or the path of a class."""
    kind = type(head)
    path = f"{kind.__module__}:{kind.__qualname__}" if isinstance(head, MethodHead) else OWN
    return next((name for name, known in HEADS.items() if known is kind), path)


def blank_head(kind: str, own: nn.Module, allowed: frozenset[str]) -> nn.Module:
    """A head to load into, of a kind that `kind_of` names.

    Args:
        own: the architecture's.
        allowed: plug-ins that may be imported.

    Raises:
        ConfigError: the kind is a plug-in's that is not allowed, or no head at all.
    """
    if kind == OWN:
        return own
    found = HEADS.get(kind) or check_type(load(PluginKind.MODEL, kind, HEADS, allowed), type, f"head '{kind}'")
    if not issubclass(found, MethodHead):
        raise ConfigError(f"head '{kind}' is a {found.__name__}: expected a subclass of MethodHead")
    return found.blank(own)


def _checked(model: SplitModel, kind: type[H]) -> H:
    if not isinstance(model.head, kind):
        raise TypeError(f"the head is a {type(model.head).__name__}: expected a {kind.__name__}")
    return model.head
