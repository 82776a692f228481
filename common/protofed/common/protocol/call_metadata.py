"""What travels beside a call, as metadata of its answer.

A health check's answer has initial metadata: the server's time and versions, and the status of the peer's certificate.
So the check itself stays the standard one. A refusal has trailing metadata: when the call may be tried again, and why
it is denied for longer than a moment. gRPC reads the first one only in its own retries, which are off on both sides.
protofed's retries read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from protofed.common.clock import stamp
from protofed.common.errors import short

RETRY_KEY = "grpc-retry-pushback-ms"
LONGEST_S = 60.0  # a daemon waits no longer, whatever a server says
_MAX_DIGITS = 12


def retry_metadata(retry_after_s: float | None) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of an answer; none if the time is not known."""
    if retry_after_s is None:
        return ()
    return ((RETRY_KEY, str(math.ceil(1000 * min(max(0.0, retry_after_s), LONGEST_S)))),)


def retry_after_s(metadata: Iterable[Any] | None) -> float:
    """Seconds to wait before the next attempt, at most `LONGEST_S`; 0.0: the metadata (key, value) do not say."""
    text = str(dict(metadata or ()).get(RETRY_KEY, ""))
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        return 0.0
    return min(int(text) / 1000, LONGEST_S)


DENIED_KEY = "protofed-denied"


class DeniedBecause(StrEnum):
    """Why a site's calls are denied until somebody acts."""

    REVOKED = "revoked"  # its certificate, for ever
    EXCLUDED = "excluded"  # the site, by the operator


def denied_metadata(because: DeniedBecause | None) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of an answer; none for other refusals."""
    return () if because is None else ((DENIED_KEY, because.value),)


def is_revoked(metadata: Iterable[Any] | None) -> bool:
    """Whether the answer to a denied call says that the caller's certificate was revoked."""
    return dict(metadata or ()).get(DENIED_KEY) == DeniedBecause.REVOKED


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
