"""What a server adds to its answer to a health check: its time and versions, and the status of the peer's certificate.

It travels as initial metadata, so that the check itself stays the standard one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from protofed.common.errors import short
from protofed.common.forms import stamp

TIME, SOFTWARE, PROTOCOL, STATUS = "protofed-time", "protofed-version", "protofed-protocol", "protofed-certificate"
ROLES = "protofed-roles"
REGISTERED, UNKNOWN = (
    "registered",
    "unknown",
)  # of a certificate; others: why it is refused


@dataclass(frozen=True)
class ServerInfo:
    """The server's time and versions, and the status of the peer's certificate; for `doctor` and the client's log.

    Attributes:
        time: of the server's clock, UTC.
        software: version of protofed.
        protocol: version of the protocol.
        status: of the peer's certificate at this server; empty on a connection in plain text.
        roles: that the registration of the peer's certificate grants; empty: none, plain text, or a server of 0.2.
    """

    time: datetime
    software: str
    protocol: int
    status: str = ""
    roles: tuple[str, ...] = ()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """As initial metadata: gRPC wants lower-case names and ASCII values."""
        fields = (TIME, stamp(self.time)), (SOFTWARE, self.software), (PROTOCOL, str(self.protocol))
        status = ((STATUS, self.status),) if self.status else ()
        roles = ((ROLES, ",".join(self.roles)),) if self.roles else ()
        return (*fields, *status, *roles)


def read_server_info(metadata: Mapping[str, str | bytes]) -> ServerInfo | None:
    """The server's info in a health check's initial metadata; None if it has none, or none that can be read.

    What answers at an address need not be a server of protofed, so texts are cut short.
    """
    fields = {name: short(str(metadata.get(name, ""))) for name in (TIME, SOFTWARE, PROTOCOL, STATUS, ROLES)}
    roles = tuple(fields[ROLES].split(",")) if fields[ROLES] else ()
    try:
        time = datetime.fromisoformat(fields[TIME])
        return ServerInfo(time.astimezone(UTC), fields[SOFTWARE], int(fields[PROTOCOL]), fields[STATUS], roles)
    except ValueError:
        return None
