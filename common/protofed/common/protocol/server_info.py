"""What a server says of itself with its answer to a health check: its time and versions, and whether it knows the peer.

It travels as initial metadata, so that the check itself stays the standard one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from protofed.common.clock import stamp
from protofed.common.errors import short

TIME, SOFTWARE, PROTOCOL, STATUS = "protofed-time", "protofed-version", "protofed-protocol", "protofed-certificate"
REGISTERED, UNKNOWN = "registered", "unknown"  # of a certificate; else why it is let in no more: revoked, expired, …


@dataclass(frozen=True)
class ServerInfo:
    """One answer's.

    Attributes:
        time: of the server's clock, UTC.
        software, protocol: its versions.
        status: of the peer's certificate, as this server has it; empty in plain text.
    """

    time: datetime
    software: str
    protocol: int
    status: str = ""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """As it travels: lower-case names, ASCII values."""
        said = (TIME, stamp(self.time)), (SOFTWARE, self.software), (PROTOCOL, str(self.protocol))
        return (*said, (STATUS, self.status)) if self.status else said


def read_greeting(metadata: Mapping[str, str | bytes]) -> ServerInfo | None:
    """What was said; None: nothing that can be understood, as by a server that is older than greetings."""
    said = {name: short(str(metadata.get(name, ""))) for name in (TIME, SOFTWARE, PROTOCOL, STATUS)}
    try:
        time = datetime.fromisoformat(said[TIME])
        return ServerInfo(time.astimezone(UTC), said[SOFTWARE], int(said[PROTOCOL]), said[STATUS])
    except ValueError:
        return None
