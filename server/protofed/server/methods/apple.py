"""APPLE: Luo and Wu, IJCAI 2022, Algorithm 1, server side (METHODS §5.17)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from protofed.server.method import (
    ExpectedUpdate,
    Method,
    Part,
    Payload,
    RoundContext,
    SiteId,
    Update,
    like,
    server_methods,
)
from protofed.server.methods.mixtures import MODEL, row
from protofed.server.methods.site_rows import index_rows, with_newest


@server_methods.register(
    Method("apple", "APPLE", "Luo and Wu, IJCAI 2022", client_options=("p_lr", "mu", "until", "schedule"))
)
@dataclass(frozen=True)
class APPLEServer:
    """Keeps each site's core model, and sends all of them to all: one payload for everybody, of S + 1 models."""

    global_model: ClassVar[bool] = False

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """The core that every site begins with, and no cores yet."""
        return model

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """All cores, and the first model for sites that come new. Whose a core is stays in part PRIVATE."""
        return state

    def start(self, state: Payload, site: SiteId, update: Payload) -> Payload:
        """The site's own core."""
        number = index_rows(state).get(site)
        return {part: state[part] for part in MODEL} if number is None else row(state[Part.SITE_MODELS], number)

    def expects(self, state: Payload) -> ExpectedUpdate:
        """The core."""
        return ExpectedUpdate(like(state, *MODEL))

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """w_k of the round's sites; of all others the last one stays."""
        return with_newest(state, updates, Part.SITE_MODELS)
