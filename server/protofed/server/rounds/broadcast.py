"""What a site, or an evaluator that refines it, is sent of a state."""

from __future__ import annotations

from protofed.common.payload import Part, Payload, SiteId
from protofed.server.method import ServerMethod


def sent(method: ServerMethod, state: Payload, site: SiteId) -> Payload:
    """A method's broadcast to a site, without what stays on the server; the same object, if there is nothing of it."""
    return public_of(method.broadcast(state, site))


def public_of(payload: Payload) -> Payload:
    """A payload without what stays on the server; the same object, if there is nothing of it."""
    if Part.PRIVATE not in payload:
        return payload
    return {part: tensors for part, tensors in payload.items() if part is not Part.PRIVATE}
