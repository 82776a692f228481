"""The number of an unforeseen error, by which the logs of both ends refer to it."""

from __future__ import annotations

import re
import secrets

_INCIDENT = re.compile(r"\bincident ([0-9a-f]{8})\b")


def new_incident() -> str:
    """A new number: eight random hexadecimal digits."""
    return secrets.token_hex(4)


def incident_text(incident: str) -> str:
    """All that a peer gets to know of an unforeseen error."""
    return f"internal error, incident {incident}"


def incident_in(text: str) -> str | None:
    """The incident in a peer's text, if there is one."""
    match = _INCIDENT.search(text)
    return match[1] if match else None
