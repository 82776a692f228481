"""The number of an error that nobody foresaw: the one word about it that the logs of both sides share."""

from __future__ import annotations

import re
import secrets

_TOLD = re.compile(r"\bincident ([0-9a-f]{8})\b")


def new_incident() -> str:
    """Eight hexadecimal digits."""
    return secrets.token_hex(4)


def incident_text(incident: str) -> str:
    """All that a peer is told."""
    return f"internal error, incident {incident}"


def incident_in(text: str) -> str | None:
    """The incident that a peer tells of, if it does."""
    found = _TOLD.search(text)
    return found[1] if found else None
