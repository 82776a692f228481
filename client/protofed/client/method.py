"""What a method does on a site, with PyTorch; and all that the author of a client half needs, in this one place.

A client half is a frozen dataclass that is a `ClientMethod`; its fields are the options that a recipe may set. The
methods of protofed import nothing else of protofed, and what is exported here stays: a package of your own does the
same (`protofed new method NAME` writes one; `protofed.common.plugins` says how a recipe names it).
"""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol, TypeAlias

from protofed.client.models.heads import CosineHead, PrototypeHead
from protofed.client.models.split import SplitModel, dump, load
from protofed.client.training.context import FitContext
from protofed.client.training.loop import Loss, Weigher, class_means, frozen, named, remembered, stacked, train
from protofed.client.training.losses import (
    Distance,
    class_shares,
    distribution_gap,
    inter_class,
    intra_class,
    prototypical_contrast,
)
from protofed.common.errors import FailureReason, TaskFailedError
from protofed.common.payload import Array, Part, Payload, SiteId, Tensors, Update
from protofed.common.registry import Registry

__all__ = [
    "Array",
    "ClientMethod",
    "CosineHead",
    "Distance",
    "FailureReason",
    "FitContext",
    "Loss",
    "Part",
    "Payload",
    "Personal",
    "PrototypeHead",
    "SiteId",
    "SplitModel",
    "TaskFailedError",
    "Tensors",
    "Update",
    "Weigher",
    "class_means",
    "class_shares",
    "client_methods",
    "distribution_gap",
    "dump",
    "frozen",
    "inter_class",
    "intra_class",
    "load",
    "named",
    "prototypical_contrast",
    "remembered",
    "stacked",
    "train",
]

# What a site itself predicts with: what its last fit left in `local.model`, or what `install` makes of the newest
# broadcast and of the site's memory.
Personal: TypeAlias = Literal["trained", "installed"]


class ClientMethod(Protocol):
    """The client half of a method."""

    personal: ClassVar[Personal]

    @property
    def sends(self) -> frozenset[Part]:
        """The parts that may be in its updates; a policy that does not allow them all refuses the run."""

    def install(self, local: FitContext, received: Payload) -> None:
        """Make `local.model` the model that was received, whatever it was before.

        Without memory, as an evaluator has none, that is the global model, if the method has one.
        """

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Train from what was received."""


client_methods: Registry[ClientMethod] = Registry("method", half="client")
