"""What a site is sent of a state."""

from __future__ import annotations

from protofed.common.payload import Part, Payload, SiteId
from protofed.server.method import ServerMethod


def sent(method: ServerMethod, state: Payload, site: SiteId) -> Payload:
    """A method's broadcast to a site, without what stays on the server; the same object, if there is nothing of it."""
    payload = method.broadcast(state, site)
    if Part.PRIVATE not in payload:
        return payload
    return {part: tensors for part, tensors in payload.items() if part is not Part.PRIVATE}
