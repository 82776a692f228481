"""What a method does on a site, with PyTorch."""

from __future__ import annotations

from typing import ClassVar, Protocol

from protofed.client.local import Local
from protofed.common.payload import Part, Payload, Update
from protofed.common.registry import Registry


class ClientMethod(Protocol):
    """The client half of a method.

    Attributes:
        sends: the parts that may be in its updates; a policy that does not allow them all refuses the run.
    """

    sends: ClassVar[frozenset[Part]]

    def install(self, local: Local, received: Payload) -> None:
        """Make `local.model` the model that was received, whatever it was before."""

    def fit(self, local: Local, received: Payload) -> Update:
        """Train from what was received; `local.model` is the site's personal model afterwards."""


client_methods: Registry[ClientMethod] = Registry("method")
