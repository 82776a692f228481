"""Solo: every site trains alone; what federation is compared with (METHODS §5.20)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from protofed.server.method import ExpectedUpdate, Method, Payload, RoundContext, SiteId, Update, server_methods


@server_methods.register(Method("solo", "training alone", sends_nothing=True))
@dataclass(frozen=True)
class SoloServer:
    """All sites begin with the same model; nothing comes back."""

    global_model: ClassVar[bool] = False

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """The common first model."""
        return model

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """The common first model."""
        return state

    def expects(self, state: Payload) -> ExpectedUpdate:
        """No tensor at all."""
        return ExpectedUpdate(required=())

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """The state as it was."""
        for _ in updates:
            pass
        return state
