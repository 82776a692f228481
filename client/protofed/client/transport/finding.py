"""What can stand between a site and its server."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What was found."""

    FINE = "fine"
    OWN_CERTIFICATE = "own-certificate"  # missing, expired, not valid yet: this side says so
    NO_NAME = "name-unknown"
    NOTHING_LISTENS = "nothing-listens"
    NO_ANSWER = "no-answer"
    PROXY_AWAY = "proxy-away"
    PROXY_PASSWORD = "proxy-password"  # noqa: S105  (a finding)
    PROXY_REFUSES = "proxy-refuses"
    NOT_TLS = "not-tls"
    OLD_TLS = "old-tls"
    SERVER_AUTHORITY = "server-authority"
    SERVER_NAME = "server-name"
    SERVER_DATES = "server-dates"
    REFUSED = "certificate-refused"  # ours, by the server
    BUSY = "busy"


UNTRUSTED = frozenset({Kind.SERVER_AUTHORITY, Kind.SERVER_NAME, Kind.SERVER_DATES})  # somebody else may be there
LASTING = frozenset({Kind.OWN_CERTIFICATE, Kind.SERVER_AUTHORITY, Kind.SERVER_NAME, Kind.PROXY_PASSWORD})


@dataclass(frozen=True)
class Finding:
    """What is wrong, and what to do; of a server that showed a certificate, the fingerprint of that."""

    kind: Kind
    text: str
    server_fingerprint: str | None = None


class FoundError(Exception):
    """Ends a probe."""

    def __init__(self, kind: Kind, text: str, server_fingerprint: str | None = None) -> None:
        super().__init__(text)
        self.finding = Finding(kind, text, server_fingerprint)
