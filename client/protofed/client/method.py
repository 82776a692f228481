"""What a method does on a site, with PyTorch."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol, TypeAlias

from protofed.client.training.context import FitContext
from protofed.common.payload import Part, Payload, Update
from protofed.common.registry import Registry

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


client_methods: Registry[ClientMethod] = Registry("method")
